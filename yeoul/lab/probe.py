"""What this machine can do at most: read rates of caches and memory, arithmetic peaks, and the w4 kernels against them.

Owns sizes, repeats and what is reported; the loops are native (native/probe.cpp). Must not print, and must not know
models. Every figure is the best of several tries, because other work on the machine only ever makes it slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from yeoul import _native

PAGES = (4 << 10, 2 << 20)
TRIES = 3
MIB = 1 << 20
MIN_MEMORY, MAX_MEMORY = 128 * MIB, 1024 * MIB
MAX_L3 = 64 * MIB
"""Large caches are shared with other machines' processes."""
ONE_PASS = 80 * MIB
"""So much takes long enough to measure reading it once."""
READ_BYTES = 128 * MIB
"""That one try of a cache reads for each thread."""
MIN_READ = 32 * MIB
"""Of a probe that runs between samples."""
ROUNDS = 1_000_000
OUTPUTS, INPUTS = 28672, 4096
"""Of the w4 matrix: 66 MB, more than most caches hold."""
ROWS = (1, 2, 4, 8, 16, 32, 64)


class ReadRate(msgspec.Struct, frozen=True, kw_only=True):
    """Reading one level of the memory."""

    level: str
    """L2, L3 or memory."""
    megabytes: float
    """Read again and again, by all threads together."""
    threads: int
    page_bytes: int
    """Asked for; a system without huge pages gives small ones."""
    gigabytes_per_second: float


class GemmRate(msgspec.Struct, frozen=True, kw_only=True):
    """A 4-bit matrix times `rows` rows of int8 activations, on all threads."""

    rows: int
    milliseconds: float
    gigabytes_per_second: float
    """Of the packed matrix."""
    tera_operations_per_second: float


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Multiplications and additions per second, in 10^12."""

    threads: int
    int8: float
    """Products of 8-bit integers, summed in 32 bits; on tiles at the level that has them."""
    float32: float


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    isa: str
    reads: list[ReadRate]
    peaks: list[Peak]
    gemm: list[GemmRate]


class ReadProbe:
    """Read rates, again and again, to lay beside samples of something else.

    Of one and all threads, on small and huge pages.
    """

    def __init__(self, isa: str, threads: int, size: int) -> None:
        """`size`: the most bytes that are read, of each of two areas.

        Raises ValueError for a level that does not run here, MemoryError.
        """
        self._isa = isa
        self._size = size
        self._pools = {count: _native.Pool(count) for count in sorted({1, threads})}
        widest = self._pools[threads]
        self._areas = {page: _native.ProbeMemory(size, page > PAGES[0], widest) for page in PAGES}

    def rate(self) -> float:
        """GB/s of the best way to read the whole area now."""
        return max(rate.gigabytes_per_second for rate in self.rates("memory", shared=self._size, tries=1))

    def rates(self, level: str, *, shared: int = 0, own: int = 0, tries: int = TRIES) -> Iterator[ReadRate]:
        """Every way to read `shared` bytes, split between the threads, or `own` bytes by each of them."""
        for threads, pool in self._pools.items():
            part = own or shared // threads
            passes = 1 if part * threads >= ONE_PASS else max(2, READ_BYTES // part)
            for page, area in self._areas.items():
                tried = [
                    _native.probe_read(pool, self._isa, area, part, passes, ahead)
                    for _ in range(tries)
                    for ahead in (False, True)
                ]
                yield ReadRate(
                    level=level,
                    megabytes=part * threads / 1e6,
                    threads=threads,
                    page_bytes=page,
                    gigabytes_per_second=max(tried) / 1e9,
                )


def cache_bytes(level: int, root: Path = Path("/")) -> int:
    """Of one cache of the second or third level; a common size where the system does not say."""
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            found = int((folder / "level").read_text()), (folder / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if found[0] == level and found[1].endswith("K") and found[1][:-1].isdigit():
            return int(found[1][:-1]) << 10
    return {2: MIB, 3: 32 * MIB}[level]


def probe(isa: str, threads: int, progress: Callable[[int, int], None]) -> ProbeReport:
    """Probe the machine with a kernel level and up to so many threads; takes seconds.

    Raises ValueError for a level that does not run here.
    """
    size = min(max(2 * cache_bytes(3), MIN_MEMORY), MAX_MEMORY)
    # Half of each cache: the rest is for others.
    second, third = cache_bytes(2) // 2, min(cache_bytes(3) // 2, MAX_L3)
    memory = ReadProbe(isa, threads, max(size, second * threads))
    stages: list[Callable[[], object]] = []
    report = ProbeReport(isa=isa, reads=[], peaks=[], gemm=[])
    stages.append(lambda: report.reads.extend(memory.rates("L2", own=second)))
    stages.append(lambda: report.reads.extend(memory.rates("L3", shared=third)))
    stages.append(lambda: report.reads.extend(memory.rates("memory", shared=size)))
    stages.append(lambda: report.peaks.extend(_peak(isa, count) for count in sorted({1, threads})))
    stages.append(lambda: report.gemm.extend(_gemm(isa, threads)))
    for done, stage in enumerate(stages, 1):
        stage()
        progress(done, len(stages))
    return report


def _peak(isa: str, threads: int) -> Peak:
    pool = _native.Pool(threads)
    int8, float32 = (
        max(_native.probe_peak(pool, isa, dot, ROUNDS) for _ in range(TRIES)) / 1e12 for dot in (True, False)
    )
    return Peak(threads=threads, int8=int8, float32=float32)


def _gemm(isa: str, threads: int) -> Iterator[GemmRate]:
    pool = _native.Pool(threads)
    matrix = _native.ProbeMatrix(pool, isa, OUTPUTS, INPUTS, max(ROWS))
    for rows in ROWS:
        seconds = min(matrix.run(rows) for _ in range(TRIES))
        operations = 2 * rows * OUTPUTS * INPUTS
        yield GemmRate(
            rows=rows,
            milliseconds=seconds * 1e3,
            gigabytes_per_second=matrix.bytes / seconds / 1e9,
            tera_operations_per_second=operations / seconds / 1e12,
        )
