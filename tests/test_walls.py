"""The walls of the house (docs/dev/ARCHITECTURE.md), kept by reading every module's imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import yeoul

PACKAGE = Path(yeoul.__file__).parent
MODULES = {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path for path in PACKAGE.rglob("*.py")}
DATA = ("types", "step", "errors")
HEAVY = ("torch", "triton", "ray", "transformers")
# All of the engine's room but its public faces: the client's protocol and the clock.
ENGINE = tuple(
    f"yeoul.{name}" for name in MODULES if name.startswith("engine.") and name[7:] not in ("client", "clock")
)


def imports(path: Path) -> set[str]:
    """Names of the modules that a file imports anywhere but under TYPE_CHECKING."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def room(module: str) -> list[str]:
    return [name for name in MODULES if name == module or name.startswith(module + ".")]


def offenders(modules: list[str], forbidden: tuple[str, ...]) -> list[str]:
    assert modules
    return [
        f"{name} imports {found}"
        for name in modules
        for found in imports(MODULES[name])
        if any(found == word or found.startswith(word + ".") for word in forbidden)
    ]


@pytest.mark.parametrize("module", DATA)
def test_data_modules_import_the_standard_library_and_msgspec_only(module: str) -> None:
    allowed = set(sys.stdlib_module_names) | {"msgspec", "yeoul.errors", "yeoul.types"}
    foreign = [
        name for name in imports(MODULES[module]) if not {name, name.split(".")[0], name.rpartition(".")[0]} & allowed
    ]
    assert foreign == []


@pytest.mark.parametrize("name", ["sched", "kv"])
def test_scheduling_knows_no_arrays_servers_or_executors(name: str) -> None:
    assert offenders(room(name), ("numpy", "torch", "yeoul.server", "yeoul.exec", "yeoul.engine")) == []


def test_models_know_ops_and_types_only() -> None:
    forbidden = ("torch", "yeoul.exec", "yeoul.sched", "yeoul.kv", "yeoul.engine", "yeoul.server", "yeoul.text")
    assert offenders(room("models"), forbidden) == []


def test_the_server_sees_the_engine_through_its_client_only() -> None:
    assert offenders(room("server"), (*ENGINE, "yeoul.exec", "yeoul.sched", "yeoul.kv", "yeoul.weights")) == []


@pytest.mark.parametrize("name", ["lab.workload", "lab.meter"])
def test_workloads_and_meters_are_pure(name: str) -> None:
    heavy = ("numpy", "torch", "asyncio", "socket", "time", "httptools")
    assert offenders([name], (*heavy, "yeoul.server", "yeoul.exec", "yeoul.engine", "yeoul.cli")) == []


def test_executors_do_not_know_the_scheduler() -> None:
    assert offenders(room("exec"), ("yeoul.sched", "yeoul.kv", *ENGINE, "yeoul.server", "yeoul.text")) == []


def test_torch_stays_outside() -> None:
    assert offenders(list(MODULES), HEAVY) == []


def test_only_the_clock_reads_time_in_the_core() -> None:
    core = [name for part in ("sched", "kv", "engine") for name in room(part) if name != "engine.clock"]
    assert offenders(core, ("time", "datetime")) == []


def test_only_config_reads_the_environment() -> None:
    readers = [
        name
        for name, path in sorted(MODULES.items())
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    ]
    # pull hands its own environment on to pip.
    assert readers == ["config", "weights.pull"]
