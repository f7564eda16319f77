"""The footprint equals what the running executor took, to the byte."""

import re
from pathlib import Path

import pytest
from native_kit import native, opened, pulled
from tiny import FAMILIES, K_SIZES, tiny_model

from yeoul.errors import UnsupportedModelError
from yeoul.exec import footprint as footprints
from yeoul.exec.footprint import footprint

NATIVE = Path(__file__).parents[2] / "native"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{}, K_SIZES, {"weight_type": "F16", "vocab": 387}], ids=["small", "k", "float"])
def test_it_equals_the_executor(tmp_path, family, sizes):
    if family == "gemma3" and "vocab" in sizes:
        sizes = {**sizes, "vocab": 451}
    with opened(tiny_model(tmp_path, family, **sizes)) as model:
        taken = footprint(model, max_tokens=96, max_positions=320)
        executor = native(model, tokens=96, length=320)
        assert sum(taken.packed.values()) == executor._weights.num_bytes
        assert taken.arena == executor._lowering.arena_bytes
        assert taken.rope == sum(rope.table.nbytes for rope in executor._ropes)
        used = {**taken.packed, **taken.vectors}
        assert set(used) == set(model.weights)
        assert taken.total == sum(used.values()) + taken.arena + taken.rope + 32 * 4 * model.spec.vocab_size


def mapped() -> int:
    """Bytes of this process's address space."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_a_process_grows_by_it_and_the_pool():
    with opened(pulled("smollm2-135m")) as model:
        taken = footprint(model, max_tokens=512, max_positions=4096)
        before = mapped()
        executor = native(model, threads=1, tokens=512, length=4096, seqs=2)
        grown = mapped() - before
    pool = executor._limits.num_blocks[0] * 16 * 23040
    # The tile of logits is allocated by the first step.
    assert grown == pytest.approx(taken.total - taken.logits + pool, rel=0.02)


def test_the_tile_of_logits_is_the_cores():
    text = (NATIVE / "program.h").read_text()
    assert int(re.search(r"kLogitRows = (\d+)", text)[1]) == footprints.LOGIT_ROWS


def test_what_the_kernels_cannot_run_is_refused(tmp_path):
    with opened(tiny_model(tmp_path, head_dim=1024)) as model, pytest.raises(UnsupportedModelError, match="1024"):
        footprint(model, max_tokens=16, max_positions=64)
