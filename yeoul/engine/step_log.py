"""StepLog: what the engine did, step by step and event by event, in memory and as JSON lines.

Owns the records' form, the ring and the file. Must not decide anything: nothing reads it back inside a step. Records
carry no text and, but for the plans dumped after a crash, no tokens.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from yeoul.errors import ConfigError
from yeoul.step import StepPlan

log = logging.getLogger(__name__)

RING_RECORDS = 2048
DUMPED_PLANS = 64
MAX_CRASH_FILES = 4
MAX_NAMED_WAITING = 16
ROW_COLUMNS = ("request", "index", "start", "n", "context", "delivered")


class HeaderRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="header"):
    """The first line: what the rest has to be read with."""

    version: int = 1
    unix: float
    """Date of `at`, in seconds since 1970."""
    at: float
    config: Mapping[str, object]
    machine: Mapping[str, object]
    model: str
    executor: str
    seed: int
    """Of the generator that seeds unseeded requests."""
    row_columns: tuple[str, ...] = ROW_COLUMNS


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One step. `drain` to `emit` are host times in seconds; `at` and the executor's times are the engine's clock."""

    step: int
    at: float
    drain: float
    schedule: float
    execute: float
    commit: float
    emit: float
    started_at: float
    finished_at: float
    rows: list[tuple[str, int, int, int, int, int]]
    """ROW_COLUMNS: request, which of n, first position, tokens computed, tokens attended to, tokens delivered."""
    preempted: list[tuple[str, int, int, int, str, int]]
    """Request, which of n, computed tokens lost and swapped out; request, which of n, that needed the blocks."""
    blocks: list[tuple[int, int, int]]
    """(used, cached, free) of every KV group, after commit."""
    num_waiting: int
    waiting: list[str]
    """The first requests in the queue; all wait for the same reason, the head's."""
    wait_reason: str | None


class EventRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event", omit_defaults=True):
    """arrive, admit (with its seed), first_schedule, deliver (the first one), abort, finish (with its reason)."""

    event: str
    at: float
    request: str
    index: int | None = None
    seed: int | None = None
    num_tokens: int | None = None
    reason: str | None = None


class CrashRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="crash"):
    """A step failed. `plans`: the last ones, oldest first, the failed one last if it had been made."""

    at: float
    error: str
    plans: list[StepPlan]


Record = HeaderRecord | StepRecord | EventRecord | CrashRecord


class StepLog:
    """A bounded ring, and a file where one is named. Only the engine's thread writes."""

    def __init__(self, header: HeaderRecord, path: str | None = None, *, crash_folder: Path | None = None) -> None:
        """`crash_folder`: where plans are dumped if there is no log file; the system's temporary folder by default.

        Raises ConfigError if the file cannot be opened.
        """
        self.header = header
        self.records: deque[StepRecord | EventRecord] = deque(maxlen=RING_RECORDS)
        self._plans: deque[StepPlan] = deque(maxlen=DUMPED_PLANS)
        self._encoder = msgspec.json.Encoder()
        self._file = None if path is None else _open(path)
        self._crash_folder = crash_folder
        self._num_crash_files = 0
        self._write(header)

    def plan(self, plan: StepPlan) -> None:
        """Remember a plan for `crash`."""
        self._plans.append(plan)

    def append(self, record: StepRecord | EventRecord) -> None:
        """Add a record to the ring and the file."""
        self.records.append(record)
        self._write(record)

    def crash(self, error: BaseException, at: float) -> None:
        """Dump the last plans: to the log file, or to a file of their own, readable by its owner only."""
        record = CrashRecord(at=at, error=f"{type(error).__name__}: {error}", plans=list(self._plans))
        if self._file is not None:
            self._write(record)
            self.flush()
        elif self._num_crash_files < MAX_CRASH_FILES:
            self._num_crash_files += 1
            self._dump(record)

    def flush(self) -> None:
        """Hand buffered lines to the system. A full disk ends the log, not the engine."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Idempotent."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("the step log ends here: %s", error.strerror)
        file, self._file = self._file, None
        if file is not None:
            # Closing tries to write once more and fails the same way; the handle is closed all the same.
            with contextlib.suppress(OSError):
                file.close()

    def _dump(self, record: CrashRecord) -> None:
        try:
            handle, name = tempfile.mkstemp(".jsonl", "yeoul-crash-", self._crash_folder)
            with os.fdopen(handle, "wb") as file:
                file.write(self._encoder.encode(self.header) + b"\n" + self._encoder.encode(record) + b"\n")
        except OSError as error:
            log.error("the last plans could not be dumped: %s", error.strerror)
        else:
            log.error("the last %d plans are in %s", len(record.plans), name)


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "wb", buffering=1 << 16)
    except OSError as error:
        raise ConfigError(
            f"the step log {path} cannot be written: {error.strerror}", hint="--step-log FILE", param="step_log"
        ) from error
