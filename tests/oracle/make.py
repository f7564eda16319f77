"""Makes the stored oracles (tests/data/oracle/*.npz) with torch and transformers. Run by hand: `make test-oracle`.

    python tests/oracle/make.py tiny
    python tests/oracle/make.py real NAME=FILE.gguf ...

Owns the way from a GGUF file to transformers' model. Never imported by tests; must not import yeoul: an oracle that
shared the reader or the arithmetic under test would agree with its mistakes.

Tiny models: their tensors are decoded by gguf-py, put under transformers' names, and run from a config written by hand.
Real files: transformers' own GGUF loader builds the model; every weight is compared with gguf-py's before it is used.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gguf
import numpy as np
import torch
import transformers
from oracle_cases import REAL_MODELS, TINY_CASES, Oracle, TinyCase, fingerprint, tiny_tokens
from tiny import PRESETS, Tiny, tiny_model

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_NAMES = NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}

MAX_DOUBLE = 10**9
"""Parameters up to which a model runs in float64: in float32 the noise of Gemma 270M's log-probabilities is 1e-3."""


def state_dict(reader: gguf.GGUFReader, family: str, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """A file's tensors under transformers' names, in its row order and without Gemma's "+1"."""
    out = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if family == "gemma3" and "norm" in tensor.name:
            data = data - 1
        if family == "llama" and tensor.name.split(".")[-2] in ("attn_q", "attn_k"):
            data = _unpermute(data, heads if ".attn_q." in tensor.name else kv_heads)
        out[_hf_name(tensor.name, family)] = torch.from_numpy(data.copy())
    return out


def _unpermute(data: np.ndarray, heads: int) -> np.ndarray:
    """Undo what converters do to the rows of q and k: (heads, 2, half) was turned into (heads, half, 2)."""
    rows = data.reshape(heads, len(data) // heads // 2, 2, -1).swapaxes(1, 2)
    return rows.reshape(data.shape)


def _hf_name(name: str, family: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, layer, stem, kind = name.split(".")
    return f"model.layers.{layer}.{(GEMMA_NAMES if family == 'gemma3' else NAMES)[stem]}.{kind}"


def tiny_config(tiny: Tiny, case: TinyCase) -> transformers.PretrainedConfig:
    options = dict(case.config)
    rope = {"rope_type": "default", "rope_theta": tiny.rope_base} | options.pop("rope", {})
    if case.model_type == "gemma3_text":
        period = options.pop("pattern", 6)
        kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(tiny.layers)]
        local = {"rope_type": "default", "rope_theta": 10000.0}
        rope = {"full_attention": rope, "sliding_attention": local}
        options |= {"layer_types": kinds, "query_pre_attn_scalar": tiny.head_dim}
    return transformers.AutoConfig.for_model(
        case.model_type,
        hidden_size=tiny.hidden,
        num_hidden_layers=tiny.layers,
        intermediate_size=tiny.ffn,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        head_dim=tiny.head_dim,
        vocab_size=tiny.vocab,
        max_position_embeddings=tiny.context,
        rms_norm_eps=tiny.eps,
        tie_word_embeddings=tiny.tied,
        rope_parameters=rope,
        pad_token_id=None,
        **options,
    )


def make_tiny(name: str, case: TinyCase, folder: Path) -> None:
    tiny = replace(PRESETS[case.family], **case.overrides)
    reader = gguf.GGUFReader(tiny_model(folder, case.family, **case.overrides))
    config = tiny_config(tiny, case)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(
        state_dict(reader, case.family, tiny.heads, tiny.kv_heads), strict=False
    )
    if unexpected or set(missing) - ({"lm_head.weight"} if tiny.tied else set()):
        raise SystemExit(f"{name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    tokens = tiny_tokens(case, tiny.vocab)
    _store(name, model, reader, tokens, np.arange(len(tokens)))


def make_real(name: str, path: Path) -> None:
    load = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **load)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **load, **options).eval()
    reader = gguf.GGUFReader(path)
    _check_weights(name, model, reader)
    text = (Path(__file__).parent / "text.txt").read_text()
    tokens = tokenizer(text)["input_ids"][: REAL_MODELS[name]]
    if len(tokens) < REAL_MODELS[name]:
        raise SystemExit(f"{name}: the text has only {len(tokens)} tokens")
    # All positions of short texts; of long ones the end, which is what they are long for, and some before.
    late = np.arange(len(tokens) - 320, len(tokens))
    _store(
        name, model, reader, tokens, late if len(tokens) == 320 else np.concatenate([np.arange(0, 240, 3), late[80:]])
    )


def _check_weights(name: str, model: transformers.PreTrainedModel, reader: gguf.GGUFReader) -> None:
    config = model.config
    family = {"llama": "llama", "qwen2": "qwen2", "gemma3_text": "gemma3"}[config.model_type]
    theirs = model.state_dict()
    ours = state_dict(reader, family, config.num_attention_heads, config.num_key_value_heads)
    for key, value in ours.items():
        if not torch.equal(theirs[key], value):
            raise SystemExit(f"{name}: transformers and gguf-py differ in {key}")
    if extra := set(theirs) - set(ours) - {"lm_head.weight"}:
        raise SystemExit(f"{name}: transformers has weights that the file has not: {sorted(extra)}")
    if "lm_head.weight" not in ours and model.lm_head.weight is not model.model.embed_tokens.weight:
        raise SystemExit(f"{name}: the output matrix is not tied")


def _store(
    name: str, model: transformers.PreTrainedModel, reader: gguf.GGUFReader, tokens: list[int], positions: np.ndarray
) -> None:
    if sum(parameter.numel() for parameter in model.parameters()) < MAX_DOUBLE:
        model = model.double()
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, positions]
        # The output matrix as the model itself would apply it, without logits of positions that are not stored.
        logprobs = torch.log_softmax(model.lm_head(hidden).double(), dim=-1).numpy()
    model_print = fingerprint((tensor.name, tensor.data) for tensor in reader.tensors)
    Oracle.of(tokens, positions, logprobs, model_print).save(name)
    print(f"{name}: {len(tokens)} tokens, {len(positions)} positions")


def main(arguments: list[str]) -> None:
    torch.manual_seed(0)
    if arguments == ["tiny"]:
        with tempfile.TemporaryDirectory() as folder:
            for name, case in TINY_CASES.items():
                make_tiny(name, case, Path(folder))
    elif arguments[:1] == ["real"] and arguments[1:]:
        for argument in arguments[1:]:
            name, _, path = argument.partition("=")
            make_real(name, Path(path))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
