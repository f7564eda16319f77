"""yeoul pull: get a model by name, or list the names. Owns how the list and the progress look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from yeoul.cli.options import JsonFlag
from yeoul.cli.terminal import progress

if TYPE_CHECKING:
    from yeoul.weights.catalogue import CatalogueEntry

MEGABYTE = 1e6


def pull(
    name: Annotated[str | None, typer.Argument(help="The model to get; none: list all.")] = None,
    *,
    json: JsonFlag = False,
) -> None:
    """Get a model onto this machine, and print the path of its file. Without a name: list the models.

    Models are kept in $YEOUL_HOME/models (default: ~/.cache/yeoul/models).
    """
    if name is None:
        _list(json)
    else:
        _pull(name, json)


def _pull(name: str, json: bool) -> None:
    from yeoul.weights import pull as puller

    with progress(name, "MB", MEGABYTE) as show:
        path = puller.pull(name, show)
    _print({"name": name, "path": str(path)}, json, str(path))


def _list(json: bool) -> None:
    from yeoul.weights.catalogue import offered

    models = [_describe(entry) for entry in offered()]
    lines = [
        f"{model['name']}  {model['description']}, {model['size'] / MEGABYTE:.0f} MB, {model['licence']}"
        f"  [{model['path'] or 'not pulled'}]"
        for model in models
    ]
    _print({"models": models}, json, "\n".join(lines))


def _describe(entry: CatalogueEntry) -> dict[str, Any]:
    from yeoul.weights.catalogue import model_path

    path = model_path(entry)
    return {
        "name": entry.name,
        "description": entry.description,
        "size": entry.size,
        "licence": entry.licence,
        "path": str(path) if path.is_file() else None,
    }


def _print(data: dict[str, Any], json: bool, text: str) -> None:
    print(msgspec.json.encode(data).decode() if json else text)
