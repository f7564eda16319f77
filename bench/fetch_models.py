"""Fetch the real test models into the folder of pulled models, where `find_model` finds them by name.

usage: python bench/fetch_models.py [NAME ...]        (default: all of the catalogue, 2 GB)

Prints one path per model.
"""

from __future__ import annotations

import sys

from yeoul.errors import YeoulError
from yeoul.weights.catalogue import CATALOGUE
from yeoul.weights.pull import fetch


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CATALOGUE]
    if unknown:
        print(f"{__doc__}\nunknown: {', '.join(unknown)}; known: {', '.join(CATALOGUE)}", file=sys.stderr)
        return 2
    for name in names or CATALOGUE:
        entry = CATALOGUE[name]
        print(f"{name}: {entry.description}, {entry.size / 1e6:.0f} MB, {entry.licence}", file=sys.stderr)
        try:
            print(fetch(entry))
        except YeoulError as error:
            print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
