"""Real, small tokenizers for the tiny models: byte-level BPE and SentencePiece, trained on one paragraph.

Owns vocabularies as GGUF stores them; must not know weights.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

CORPUS = """the quick brown fox jumps over the lazy dog and then the stream runs over the stones to the sea.
a request asks for tokens and the engine answers with tokens, one after the other, until the stream ends.
what is the name of the river? the river is called the rapids, where the water runs shallow and fast.
def main(self, name): return self.name and print(name) for name in names if name is not None else the other
user assistant system hello there, how are you? I am here to help you with this and that, thank you."""

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)
GEMMA_TURNS = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else 'user' %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6
"""GGUF's token types."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as GGUF's `tokenizer.ggml.*` keys hold it."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    bos: int
    eos: int
    pad: int
    unknown: int | None
    add_bos: bool
    merges: list[str] | None = None
    scores: list[float] | None = None


def byte_level(pre: str, size: int) -> Vocabulary:
    """GPT-2 style vocabulary; the special tokens stand first (`smollm`) or last (`qwen2`), as in the real files.

    Where the corpus yields fewer merges than asked for, unused tokens fill up, as in the real files too.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = _byte_alphabet()
    spelled = ["".join(alphabet[byte] for byte in word.encode()) for word in _words()]
    merges = _train(spelled, size - 256 - len(special))
    plain = [alphabet[byte] for byte in range(256)] + [left + right for left, right in merges]
    first = pre == "smollm"
    spare = [f"<unused{index}>" for index in range(size - len(plain) - len(special))]
    tokens = special + plain + spare if first else plain + special + spare
    kinds = dict.fromkeys(special, CONTROL) | dict.fromkeys(spare, UNUSED)
    types = [kinds.get(token, NORMAL) for token in tokens]
    ids = {token: index for index, token in enumerate(tokens)}
    joined = [f"{left} {right}" for left, right in merges]
    bos = ids["<|im_start|>"] if first else ids["<|endoftext|>"]
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    return Vocabulary("gpt2", pre, tokens, types, bos, end, pad, None, False, merges=joined)


def sentencepiece(size: int) -> Vocabulary:
    """SentencePiece BPE vocabulary with byte fallback and scores, as Gemma's."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    special += [("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL)]
    special += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    spelled = [word.replace(" ", "\u2581") for word in _words()]
    letters = sorted(set("".join(spelled)))
    merges = _train(spelled, size - len(special) - len(letters))
    pieces = [left + right for left, right in merges] + letters
    spare = [f"<unused{index}>" for index in range(size - len(special) - len(pieces))]
    tokens = [token for token, _ in special] + pieces + spare
    types = [kind for _, kind in special] + [NORMAL] * len(pieces) + [UNUSED] * len(spare)
    scores = [-1000.0] * len(special) + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(spare)
    return Vocabulary("llama", "default", tokens, types, 2, 1, 0, 3, True, scores=scores)


def _words() -> list[str]:
    return re.findall(r" ?[A-Za-z]+|[^A-Za-z ]", CORPUS)


def _train(words: list[str], num_merges: int) -> list[tuple[str, str]]:
    """Byte pair encoding (Sennrich et al., 2016); ties go to the pair that sorts first. May find fewer merges."""
    counts = Counter(tuple(word) for word in words)
    merges = []
    while len(merges) < num_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in counts.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged: Counter[tuple[str, ...]] = Counter()
        for word, count in counts.items():
            merged[_join(word, best)] += count
        counts = merged
    return merges


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    index = 0
    while index < len(word):
        both = word[index : index + 2] == pair
        out.append("".join(pair) if both else word[index])
        index += 2 if both else 1
    return tuple(out)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + hidden.index(byte)) for byte in range(256)]
