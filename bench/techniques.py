"""What the serving techniques buy: `python bench/techniques.py [EXPERIMENT ...]`, on a real model and engine.

    allocation   paged against reserve_max at the same KV pool: sequences at a time, throughput, waste
    batching     continuous against static on the same lengths
    chunking     largest gap of 8 running sequences while a long prompt arrives, in chunks and whole
    prefix       TTFT with 0, 50 and 90 % of the prompt shared, cache on and off

Variants take turns within a repeat, so that a change of the machine's mood hits all of them. Lengths are log-normal
(`length_mix.json`: mean 300 tokens, long tail). Figures are medians with the smallest and largest of all repeats.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from report import finish, show, summary

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine
from yeoul.engine.loop import Engine
from yeoul.types import Request, SamplingParams

MIX = Path(__file__).with_name("length_mix.json")
Figures = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What the command line says."""

    model: str
    requests: int
    repeats: int
    long_prompt: int
    prompt: int
    pool_tokens: int
    max_model_len: int


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(EXPERIMENTS)}; all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=64, help="of the length mix")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--long-prompt", type=int, default=2000, help="tokens that arrive in `chunking`")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens in `prefix`")
    parser.add_argument("--pool-tokens", type=int, default=8192, help="tokens that the KV pool holds")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = vars(parser.parse_args())
    names, path = options.pop("experiments") or list(EXPERIMENTS), options.pop("json")
    if unknown := set(names) - set(EXPERIMENTS):
        parser.error(f"there is no experiment {', '.join(sorted(unknown))}")
    setting = Setting(**options)
    results = {}
    for name in names:
        title, variants = EXPERIMENTS[name]
        results[name] = measure(variants(setting), setting.repeats)
        show(title, results[name])
    finish(results, options, path)


def measure(variants: Mapping[str, Callable[[], Figures]], repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Run all variants in turn, `repeats` times; every figure's summary."""
    samples: dict[str, list[Figures]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            samples[name].append(run())
    return {
        name: {figure: summary([one[figure] for one in runs]) for figure in runs[0]} for name, runs in samples.items()
    }


def engine_of(setting: Setting, **options: object) -> Engine:
    """An engine with a pool of setting.pool_tokens and everything else by default but the options."""
    config = {
        "model": setting.model,
        "max_model_len": setting.max_model_len,
        "num_kv_blocks": setting.pool_tokens // 16 + 1,
        "enable_prefix_caching": False,
        "seed": 1,
    }
    return build_engine(EngineConfig(**{**config, **options}))  # type: ignore[arg-type]


def request(name: str, prompt: Iterable[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=list(prompt), params=params)


def tokens(rng: random.Random, count: int, engine: Engine) -> list[int]:
    """Random token ids."""
    return [rng.randrange(engine.info.vocab_size // 2) for _ in range(count)]


def length_mix(setting: Setting) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every request; output is what is generated and max_tokens."""
    pairs = json.loads(MIX.read_text())["lengths"][: setting.requests]
    longest = setting.max_model_len
    return [(min(prompt, longest // 2), min(output, longest // 2 - 1)) for prompt, output in pairs]


def serve_mix(setting: Setting, **options: object) -> Figures:
    """All requests of the mix at once, until the last one is done."""
    engine, rng = engine_of(setting, **options), random.Random(1)
    for number, (prompt, output) in enumerate(length_mix(setting)):
        engine.add(request(f"r{number}", tokens(rng, prompt, engine), output))
    running, waste, started = [], [], time.perf_counter()
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        if stats.num_waiting:  # Only while there is demand for more: the tail says nothing about the technique.
            held = stats.kv_computed_slots + stats.kv_partial_slots
            held += stats.kv_reserved_slots + stats.kv_over_reserved_slots
            running.append(stats.num_running)
            waste.append(1 - stats.kv_computed_slots / held if held else 0.0)
    seconds = time.perf_counter() - started
    stats = engine.stats()
    engine.close()
    return {
        "tokens/s": stats.generation_tokens / seconds,
        "sequences": sum(running) / max(len(running), 1),
        "waste": sum(waste) / max(len(waste), 1),
        "preemptions": float(stats.preemptions),
    }


def allocation(setting: Setting) -> dict[str, Callable[[], Figures]]:
    return {
        name: lambda name=name: serve_mix(setting, kv_allocation=name)
        for name in ("paged", "reserve_max", "reserve_exact", "pow2")
    }


def batching(setting: Setting) -> dict[str, Callable[[], Figures]]:
    return {
        name: lambda name=name: serve_mix(setting, batching=name, max_num_seqs=16)
        for name in ("continuous", "static", "prefill_first")
    }


def long_arrival(setting: Setting, budget: int) -> Figures:
    """Gaps between deliveries of 8 running sequences from when a long prompt arrives until its first token."""
    engine, rng = engine_of(setting, max_num_batched_tokens=budget), random.Random(2)
    for number in range(8):
        engine.add(request(f"r{number}", tokens(rng, 32, engine), 1000))
    for _ in range(12):
        engine.step()
    engine.add(request("long", tokens(rng, setting.long_prompt, engine), 1))
    gaps, last, begun, arrived = [], time.perf_counter(), False, time.perf_counter()
    while not begun:
        outputs = engine.step().outputs
        now = time.perf_counter()
        gaps.append(now - last)
        last, begun = now, any(output.request_id == "long" for output in outputs)
    engine.close()
    return {"largest TBT, ms": 1e3 * max(gaps), "TTFT of the long one, ms": 1e3 * (last - arrived)}


def chunking(setting: Setting) -> dict[str, Callable[[], Figures]]:
    whole = setting.long_prompt + 8
    return {
        "chunks of 64": lambda: long_arrival(setting, 64),
        "chunks of 256": lambda: long_arrival(setting, 256),
        "whole": lambda: long_arrival(setting, whole),
    }


def shared_prefix(setting: Setting, share: float, caching: bool) -> Figures:
    """TTFT of prompts that share their beginning with one that was served before."""
    engine, rng = engine_of(setting, enable_prefix_caching=caching), random.Random(3)
    common = tokens(rng, int(setting.prompt * share), engine)
    times = []
    for number in range(4):
        prompt = [*common, *tokens(rng, setting.prompt - len(common), engine)]
        started = time.perf_counter()
        engine.add(request(f"r{number}", prompt, 1))
        while engine.has_work:
            engine.step()
        times.append(time.perf_counter() - started)
    hits = engine.stats().prefix_cache_hits
    engine.close()
    return {"TTFT, ms": 1e3 * summary(times[1:])["median"], "tokens found": hits / 3}


def prefix(setting: Setting) -> dict[str, Callable[[], Figures]]:
    return {
        f"{share:.0%} shared, cache {'on' if caching else 'off'}": lambda share=share, caching=caching: shared_prefix(
            setting, share, caching
        )
        for share in (0.0, 0.5, 0.9)
        for caching in (True, False)
    }


EXPERIMENTS = {
    "allocation": ("Allocation at the same pool", allocation),
    "batching": ("Batching, at most 16 sequences", batching),
    "chunking": ("A long prompt beside 8 running sequences", chunking),
    "prefix": ("Prefix cache", prefix),
}

if __name__ == "__main__":
    main()
