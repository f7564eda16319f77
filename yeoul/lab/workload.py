"""What a benchmark asks for: prompts, lengths and arrival times, all from one seed.

Pure: must not know sockets, engines, tokenizers or clocks.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from yeoul.errors import ConfigError

ARRIVALS = ("poisson", "constant", "burst")
ENDPOINTS = ("completions", "chat")
MAX_TOKENS = 1 << 20
MAX_FILE_BYTES = 1 << 28
# Short English words, one token each with a space before them in practically every vocabulary.
WORDS = (
    "the of and to in is was for on that with as it by at from his an are were which this be or had not but have "
    "one their they all who you there been other when more into time has her would what she will about out up if so "
    "no them some than could may only these two first new any its after like then now over also man our well made "
    "many must under world life day water house long little great old year part place work land river stone light"
)


class Lengths(msgspec.Struct, frozen=True):
    """Numbers of tokens from `low` to `high`, both included, all equally likely."""

    low: int
    high: int

    def pick(self, random: Random) -> int:
        """One of them."""
        return random.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a server, and when. Every field is a flag of `yeoul bench serve`.

    Raises ConfigError, naming the option, for a value out of range.
    """

    requests: int = 100
    """That are measured."""
    rate: float | None = None
    """Open loop: requests per second, whatever the server does."""
    arrivals: str = "poisson"
    burst: int = 8
    """Requests that arrive together, where arrivals is burst."""
    users: int | None = None
    """Closed loop: users that each wait for their reply; None: one, unless there is a rate."""
    input_tokens: str = "128"
    """Of random prompts: a number or a range."""
    output_tokens: str = "128"
    prompts: str | None = None
    """File of prompts, instead of random ones."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None and self.users is not None:
            raise ConfigError("rate and users exclude each other", param="users")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"arrivals must be one of {', '.join(ARRIVALS)}, got {self.arrivals!r}", param="arrivals")
        bounds = (("requests", 1, 1_000_000), ("rate", 1e-3, 1e6), ("burst", 1, 1_000_000), ("users", 1, 10_000))
        for name, low, high in bounds:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value}", param=name)
        for name in ("input_tokens", "output_tokens"):
            parse_lengths(getattr(self, name))

    def items(self) -> list[Item]:
        """One request more than are measured: the first is for finding out whether the server answers."""
        random = Random(self.seed)
        output_tokens = parse_lengths(self.output_tokens)
        if self.prompts is not None:
            return file_items(Path(self.prompts), self.requests + 1, output_tokens, random)
        return random_items(self.requests + 1, parse_lengths(self.input_tokens), output_tokens, random)

    def arrival_times(self) -> list[float] | None:
        """Seconds after the start at which requests arrive; None in a closed loop."""
        if self.rate is None:
            return None
        # Not from the generator of the prompts: at another rate they are the same.
        return arrival_times(self.arrivals, self.rate, self.requests, self.burst, Random(f"arrivals {self.seed}"))


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a workload."""

    prompt: str
    output_tokens: int


def parse_lengths(text: str) -> Lengths:
    """`128` or `64-256`. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ConfigError(f"{text!r} is no number of tokens such as 128, or range such as 64-256")
    return Lengths(low, high)


def random_items(count: int, input_tokens: Lengths, output_tokens: Lengths, random: Random) -> list[Item]:
    """Prompts of as many random words as tokens are wanted: about as many tokens for any tokenizer.

    Text, not token ids, because not every server takes ids; how many tokens it became is what the server's usage says.
    """
    items = []
    for _ in range(count):
        words = random.choices(WORDS.split(), k=input_tokens.pick(random))
        items.append(Item(prompt=" ".join(words), output_tokens=output_tokens.pick(random)))
    return items


def file_items(path: Path, count: int, output_tokens: Lengths, random: Random) -> list[Item]:
    """`count` prompts of a file, in an order of their own, repeated where the file has fewer.

    A `.jsonl` file has one object per line: `prompt`, and `output_tokens` where the line wants its own; any other file
    has one prompt per line. Raises ConfigError, naming the line.
    """
    found = _read_items(path, output_tokens, random)
    if not found:
        raise ConfigError(f"{path} has no prompts")
    random.shuffle(found)
    return [found[i % len(found)] for i in range(count)]


def _read_items(path: Path, output_tokens: Lengths, random: Random) -> list[Item]:
    structured = path.suffix == ".jsonl"
    items = []
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        length = output_tokens.pick(random)
        if structured:
            items.append(_parse_item(line, length, f"line {number} of {path}"))
        else:
            items.append(Item(prompt=line.rstrip("\r"), output_tokens=length))
    return items


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8") from None


def _parse_item(line: str, length: int, where: str) -> Item:
    try:
        parsed: Any = msgspec.json.decode(line)
    except msgspec.DecodeError:
        parsed = None
    fields = parsed if isinstance(parsed, dict) else {}
    prompt, wanted = fields.get("prompt"), fields.get("output_tokens", length)
    if not isinstance(prompt, str) or not prompt or not fields.keys() <= {"prompt", "output_tokens"}:
        raise ConfigError(f"{where} is no object with a prompt", hint='{"prompt": "...", "output_tokens": 64}')
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MAX_TOKENS:
        raise ConfigError(f"output_tokens in {where} must be an integer between 1 and {MAX_TOKENS}")
    return Item(prompt=prompt, output_tokens=wanted)


def arrival_times(arrivals: str, rate: float, count: int, burst: int, random: Random) -> list[float]:
    """Seconds after the start at which `count` requests arrive, `rate` a second in the mean.

    `poisson`: independent of each other; `constant`: evenly; `burst`: `burst` at the same moment, evenly.
    """
    if arrivals == "burst":
        return [i // burst * burst / rate for i in range(count)]
    if arrivals == "constant":
        return [i / rate for i in range(count)]
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += random.expovariate(rate)
    return times
