"""The matrix: random traffic through engines with random techniques, on the real native kernels.

A mix is made from a seed alone: which techniques, how small the pools, which requests arrive when, who is aborted. What
must hold: every reply, log-probabilities included, is bit-equal to that of the request alone on an engine with every
technique off and room for everything; the books balance after every step; one terminal output for each sequence; in the
end nothing is used.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine
from yeoul.engine.loop import Engine
from yeoul.types import FinishReason, Request, SamplingParams

OFF = {
    "enable_prefix_caching": False,
    "fork": False,
    "batching": "continuous",
    "scheduling_policy": "fcfs",
    "kv_allocation": "paged",
    "preemption_victim": "latest",
    "preemption_mode": "recompute",
    "max_num_batched_tokens": 256,
    "num_threads": 1,
}
"""The plain engine: the first value of every technique, with prompts in one piece."""
TECHNIQUES = {
    "enable_prefix_caching": (False, True),
    "fork": (False, True),
    "batching": ("continuous", "prefill_first", "static"),
    "scheduling_policy": ("fcfs", "priority", "shortest_prompt", "longest_prefix"),
    "kv_allocation": ("paged", "reserve_max", "reserve_exact", "pow2"),
    "preemption_victim": ("latest", "lowest_priority"),
    "preemption_mode": ("recompute", "swap"),
    "max_num_batched_tokens": (256, 24, 5),
    "num_threads": (1, 2),
}


@dataclass(frozen=True)
class Model:
    """A model file and the traffic that suits it."""

    path: Path
    vocab_size: int
    max_model_len: int
    pools: tuple[int, ...]
    """Values of num_kv_blocks: the smallest forces preemption all the time, the largest hardly ever."""
    prompts: tuple[int, ...]
    """Lengths of what a prompt has of its own, after what it shares."""
    outputs: tuple[int, ...]
    num_requests: int
    engine: Mapping[str, object] = field(default_factory=dict)
    """Options of every engine, the plain one too."""


class TickClock:
    """Every look at the clock takes a hundredth of a second, so that a mix is the same on every machine."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 0.01
        return self.time

    def unix(self):
        return 0.0


@dataclass
class Mix:
    """What one seed makes."""

    techniques: dict[str, object]
    num_kv_blocks: int
    max_num_seqs: int
    ageing_seconds: float
    arrivals: list[tuple[int, Request]]
    aborts: dict[str, int]


@dataclass
class Outcome:
    """What a run delivered, by (request, index), and what it went through."""

    tokens: dict = field(default_factory=lambda: defaultdict(tuple))
    texts: dict = field(default_factory=lambda: defaultdict(str))
    logprobs: dict = field(default_factory=lambda: defaultdict(tuple))
    reasons: dict = field(default_factory=dict)
    counters: Counter = field(default_factory=Counter)

    def take(self, output):
        key = output.request_id, output.index
        assert key not in self.reasons, f"{key} got something after its terminal output"
        self.tokens[key] += output.token_ids
        self.texts[key] += output.text
        self.logprobs[key] += output.logprobs
        if output.finish_reason is not None:
            self.reasons[key] = output.finish_reason

    def of(self, key):
        return self.tokens[key], self.texts[key], self.logprobs[key], self.reasons.get(key)


def make_mix(seed: int, model: Model) -> Mix:
    rng = random.Random(seed)
    techniques = {name: rng.choice(values) for name, values in TECHNIQUES.items()}
    shared = [[rng.randrange(3, model.vocab_size) for _ in range(100)] for _ in range(2)]
    arrivals, aborts, step = [], {}, 0
    for number in range(model.num_requests):
        step += rng.choice([0, 0, 0, 1, 4, 12])
        made = _request(f"r{number}", rng, shared, model)
        arrivals.append((step, made))
        if rng.random() < 0.15:
            aborts[made.request_id] = step + rng.choice([0, 1, 3, 10, 30])
    return Mix(
        techniques,
        num_kv_blocks=rng.choice(model.pools),
        max_num_seqs=rng.choice([2, 4, 8]),
        ageing_seconds=rng.choice([0.0, 0.5, 60.0]),
        arrivals=arrivals,
        aborts=aborts,
    )


def _request(name: str, rng: random.Random, shared: list[list[int]], model: Model) -> Request:
    own = [rng.randrange(3, model.vocab_size) for _ in range(rng.choice(model.prompts))]
    params = SamplingParams(
        max_tokens=rng.choice(model.outputs),
        temperature=rng.choice([0.0, 0.8, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(6),
        n=rng.choice([1, 1, 1, 2, 3]),
        stop=rng.choice([(), (), ("e",), ("a", "10")]),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, 0, 2]),
    )
    prompt = [*rng.choice(shared)[: rng.choice([0, 10, 32, 40, 64])], *own]
    salt = rng.choice([None, None, None, "salt"])
    return Request(
        request_id=name, prompt_token_ids=prompt, params=params, priority=rng.randrange(-1, 3), cache_salt=salt
    )


def run_mix(mix: Mix, model: Model) -> Outcome:
    """Run a mix to its end, checking the books after every step."""
    options = dict(mix.techniques)
    if options["preemption_mode"] == "swap":
        options["swap_space"] = 1 << 20
    engine = _engine(model, mix.num_kv_blocks, mix.max_num_seqs, mix.ageing_seconds, options)
    outcome = _drive(engine, mix.arrivals, mix.aborts)
    engine.close()
    sequences = {(made.request_id, index) for _, made in mix.arrivals for index in range(made.params.n)}
    assert set(outcome.reasons) == sequences, "not every sequence came to its end"
    return outcome


class Solo:
    """Requests one at a time on a plain engine, which keeps nothing of one for the next."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._engine = _engine(model, 200, 8, 60.0, OFF)

    def run(self, made: Request) -> Outcome:
        outcome = _drive(self._engine, [(0, made)], {})
        assert not outcome.counters["preemptions"] and not outcome.counters["prefix_cache_hits"]
        return outcome

    def close(self) -> None:
        self._engine.close()


def tiny(path: Path, vocab_size: int = 448, **engine: object) -> Model:
    """Traffic for tests/tiny.py's gemma3, which has a full and a window group."""
    return Model(
        path,
        vocab_size,
        max_model_len=160,
        pools=(11, 12, 14, 30),
        prompts=(1, 5, 16, 30),
        outputs=(3, 17, 40, 60),
        num_requests=8,
        engine=engine,
    )


def _engine(model: Model, blocks: int, seqs: int, ageing: float, options: dict) -> Engine:
    config = EngineConfig(
        model=str(model.path),
        max_model_len=model.max_model_len,
        num_kv_blocks=blocks,
        max_num_seqs=seqs,
        ageing_seconds=ageing,
        seed=1,
        clock=TickClock(),
        **model.engine,
        **options,
    )
    return build_engine(config)


def _drive(engine: Engine, arrivals, aborts) -> Outcome:
    outcome, pending, aborts = Outcome(), list(arrivals), dict(aborts)
    for step in range(20000):
        while pending and pending[0][0] <= step:
            made = pending.pop(0)[1]
            engine.check(made)
            engine.add(made)
        for name in [name for name, when in aborts.items() if when <= step]:
            engine.abort(name)
            del aborts[name]
        for output in engine.step().outputs:
            outcome.take(output)
        engine.check_books()
        if not pending and not engine.has_work:
            break
    stats = engine.stats()
    assert (stats.kv_used_blocks, stats.num_running, stats.num_waiting, stats.swap_used_bytes) == (0, 0, 0, 0)
    assert stats.finished["error"] == 0
    for name in ("preemptions", "swapped_tokens", "lost_tokens", "forks", "prefix_cache_hits", "num_steps"):
        outcome.counters[name] = getattr(stats, name)
    return outcome


def check_mix(seed: int, solo_runs: Solo) -> tuple[Mix, Outcome]:
    """Make and run a mix, and compare every reply with its solo run. AssertionError, naming the mix, if one differs."""
    mix = make_mix(seed, solo_runs.model)
    return mix, compare(mix, solo_runs, f"mix {seed}")


def compare(mix: Mix, solo_runs: Solo, name: str) -> Outcome:
    """Run a mix and compare every reply. AssertionError, with the mix's name, for the first one that differs."""
    outcome = run_mix(mix, solo_runs.model)
    for _, made in mix.arrivals:
        solo = solo_runs.run(made)
        for index in range(made.params.n):
            key = made.request_id, index
            got, expected = outcome.of(key), solo.of(key)
            if got[3] is FinishReason.ABORT:
                assert made.request_id in mix.aborts, f"{name}: {key} was not to be aborted"
                got, expected = _beginning(got), _beginning(expected, len(got[0]))
            assert got == expected, f"{name}, {mix.techniques}: {key} differs from its solo reply"
    return outcome


def _beginning(reply, count=None):
    """Tokens and log-probabilities of an aborted reply, which the solo reply must begin with."""
    tokens, _, logprobs, _ = reply
    return tokens[:count], logprobs[:count]
