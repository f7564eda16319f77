"""Run many mixes and write what was exercised as a page: `python tests/matrix/run_matrix.py --mixes 1000 --page FILE`.

Stops at the first mix with a difference, which it names, so that it can be run again alone (`--first SEED --mixes 1`).
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from itertools import combinations
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from mixes import OFF, Solo, check_mix, tiny  # noqa: E402
from tiny import tiny_model  # noqa: E402

LABELS = {
    ("enable_prefix_caching", True): "prefix cache",
    ("fork", True): "fork",
    ("batching", "prefill_first"): "prefill_first",
    ("batching", "static"): "static",
    ("scheduling_policy", "priority"): "priority",
    ("scheduling_policy", "shortest_prompt"): "shortest_prompt",
    ("scheduling_policy", "longest_prefix"): "longest_prefix",
    ("kv_allocation", "reserve_max"): "reserve_max",
    ("kv_allocation", "reserve_exact"): "reserve_exact",
    ("kv_allocation", "pow2"): "pow2",
    ("preemption_victim", "lowest_priority"): "lowest_priority",
    ("preemption_mode", "swap"): "swap",
    ("max_num_batched_tokens", 24): "chunks of 24",
    ("max_num_batched_tokens", 5): "chunks of 5",
    ("num_threads", 2): "2 threads",
}
PAGE = """# Techniques, in every combination

Made by `make matrix`; do not edit.

A mix is random traffic (arrivals, lengths, shared beginnings, salts, priorities, aborts, n, seeds, stop strings)
through the native executor on a tiny random model with a full and a sliding-window KV group, in pools small enough to
preempt, with techniques chosen at random. **{mixes} mixes, {sequences} sequences: every reply and every
log-probability was bit-equal to that of the request alone** with all techniques off; after every step the books
balanced; every sequence had one terminal output; in the end no block was used.

On the way: {preemptions} preemptions ({swapped_tokens} computed tokens swapped out, {lost_tokens} given up),
{forks} forks, {prefix_cache_hits} prompt tokens found in the prefix cache, {num_steps} steps.

Each number is how many mixes had both techniques on; the diagonal.

{table}
"""


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixes", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first mix")
    parser.add_argument("--page", type=Path, help="file to write; none: only print the counts")
    options = parser.parse_args()
    totals, pairs = run(options.first, options.mixes)
    print({name: totals[name] for name in sorted(totals)})
    if options.page is not None:
        missing = [pair for pair in combinations(LABELS, 2) if pair[0][0] != pair[1][0] and not pairs[pair]]
        if missing:
            sys.exit(f"these pairs were never on together: {missing}")
        options.page.write_text(PAGE.format(table=table(pairs), **totals))


def run(first: int, count: int) -> tuple[Counter[str], Counter[object]]:
    """Counts over all mixes: what happened, and which techniques were on together."""
    totals: Counter[str] = Counter()
    pairs: Counter[object] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        solo = Solo(tiny(tiny_model(Path(folder), "gemma3")))
        started = time.monotonic()
        for seed in range(first, first + count):
            mix, outcome = check_mix(seed, solo)
            totals.update(outcome.counters, mixes=1, sequences=len(outcome.reasons))
            on = [key for key in LABELS if mix.techniques[key[0]] == key[1] != OFF[key[0]]]
            pairs.update((key, key) for key in on)
            pairs.update(combinations(on, 2))
            if (seed - first + 1) % 100 == 0:
                print(f"{seed - first + 1} mixes, {time.monotonic() - started:.0f} s", file=sys.stderr)
        solo.close()
    return totals, pairs


def table(pairs: Counter[object]) -> str:
    """The lower triangle in Markdown; two values of one technique cannot be on together."""
    names = list(LABELS)
    lines = ["| | " + " | ".join(LABELS[name] for name in names) + " |", "| --- " * (len(names) + 1) + "|"]
    for row, name in enumerate(names):
        cells = [_cell(pairs, other, name) for other in names[: row + 1]]
        lines.append("| " + " | ".join([LABELS[name], *cells, *[""] * (len(names) - row - 1)]) + " |")
    return "\n".join(lines)


def _cell(pairs: Counter[object], one: tuple[str, object], other: tuple[str, object]) -> str:
    return "-" if one[0] == other[0] and one != other else str(pairs[one, other])


if __name__ == "__main__":
    main()
