"""What every benchmark here prints: a table of medians and spreads, then one JSON object as the last line."""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from yeoul.engine.machine import describe_machine


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of some samples."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def show(title: str, rows: Mapping[str, Mapping[str, dict[str, float]]]) -> None:
    """One line per variant, one column per figure: median (min .. max)."""
    figures = list(next(iter(rows.values())))
    cells = [["", *figures]]
    for name, row in rows.items():
        cells.append([name, *(f"{f['median']:.4g} ({f['min']:.4g} .. {f['max']:.4g})" for f in row.values())])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def finish(results: Mapping[str, object], options: Mapping[str, object], path: Path | None) -> None:
    """Print everything as one line of JSON, with the machine, the commit and the options; also to a file if named."""
    record = {
        "commit": _commit(),
        "machine": describe_machine(),
        "options": {name: str(value) for name, value in options.items()},
        "results": results,
    }
    line = json.dumps(record)
    if path is not None:
        path.write_text(line + "\n")
    print(line)


def _commit() -> str:
    folder = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
