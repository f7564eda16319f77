"""What this machine can do at most: read rates of caches and memory, arithmetic peaks, and the w4 kernels against them.

Owns sizes, repeats and what is reported; the loops are native (native/probe.cpp). Must not print, and must not know
models. Every figure is the best of several tries, because other work on the machine only ever makes it slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec

from yeoul import _native

PAGES = (4 << 10, 2 << 20)
TRIES = 3
MIB = 1 << 20
MIN_MEMORY, MAX_MEMORY = 128 * MIB, 1024 * MIB
READ_BYTES = 128 * MIB
"""That one try of a cache reads for each thread."""
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
    """Products of 8-bit integers, summed in 32 bits, by vector instructions."""
    float32: float


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    isa: str
    reads: list[ReadRate]
    peaks: list[Peak]
    gemm: list[GemmRate]


class MemoryProbe:
    """The read rate of memory, again and again, to lay beside samples of something else.

    The best of one and all threads on small and huge pages. Holds two areas larger than the caches.
    """

    def __init__(self, isa: str, threads: int) -> None:
        """Raises ValueError for a level that does not run here, MemoryError."""
        self._isa = isa
        self._pools = {count: _native.Pool(count) for count in sorted({1, threads})}
        self._bytes = min(max(4 * cache_bytes(3), MIN_MEMORY), MAX_MEMORY)
        widest = self._pools[threads]
        self._areas = {page: _native.ProbeMemory(self._bytes, page > PAGES[0], widest) for page in PAGES}

    def rate(self) -> float:
        """GB/s now."""
        return max(rate.gigabytes_per_second for rate in self.rates(tries=1))

    def rates(self, tries: int = TRIES) -> Iterator[ReadRate]:
        """Each number of threads with each page size."""
        yield from self._level("memory", lambda threads: self._bytes // threads, tries)

    def caches(self) -> Iterator[ReadRate]:
        """The same for L2 (of each core) and L3 (shared), half of each: the rest is for others."""
        second, third = cache_bytes(2) // 2, cache_bytes(3) // 2
        yield from self._level("L2", lambda threads: second, TRIES)
        yield from self._level("L3", lambda threads: third // threads, TRIES)

    def _level(self, level: str, share: Callable[[int], int], tries: int) -> Iterator[ReadRate]:
        for threads, pool in self._pools.items():
            own = share(threads)
            passes = 1 if level == "memory" else max(2, READ_BYTES // own)
            for page, area in self._areas.items():
                best = max(
                    _native.probe_read(pool, self._isa, area, own, passes, ahead)
                    for _ in range(tries)
                    for ahead in (False, True)
                )
                yield ReadRate(
                    level=level,
                    megabytes=own * threads / 1e6,
                    threads=threads,
                    page_bytes=page,
                    gigabytes_per_second=best / 1e9,
                )


def cache_bytes(level: int) -> int:
    """Of one cache of the second or third level; a common size where the system does not say."""
    name = f"SC_LEVEL{level}_CACHE_SIZE"
    size = os.sysconf(name) if name in os.sysconf_names else 0
    return size if size > 0 else {2: MIB, 3: 32 * MIB}[level]


def probe(isa: str, threads: int, progress: Callable[[int, int], None]) -> ProbeReport:
    """Probe the machine with a kernel level and up to so many threads; takes seconds.

    Raises ValueError for a level that does not run here.
    """
    memory = MemoryProbe(isa, threads)
    stages: list[Callable[[], object]] = []
    report = ProbeReport(isa=isa, reads=[], peaks=[], gemm=[])
    stages.append(lambda: report.reads.extend(memory.caches()))
    stages.append(lambda: report.reads.extend(memory.rates()))
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
