"""The native probe: loops that really run on every kernel level, and arguments that are checked."""

import json

import pytest
from cli_kit import inline, refuses

from yeoul import _native
from yeoul.lab import probe

MIB = 1 << 20


@pytest.fixture(scope="module")
def pool():
    return _native.Pool(2)


@pytest.mark.parametrize("isa", _native.isa_levels())
def test_no_loop_is_optimized_away(pool, isa):
    """A loop that the compiler removed would seem to run a thousand times faster than any processor can."""
    for dot in (True, False):
        assert 1e6 < _native.probe_peak(pool, isa, dot, 200_000) < 1e14
    for huge in (False, True):
        memory = _native.ProbeMemory(4 * MIB, huge, pool)
        for ahead in (False, True):
            assert 1e6 < _native.probe_read(pool, isa, memory, 2 * MIB, 1, ahead) < 1e13
            assert 1e6 < _native.probe_read(pool, isa, memory, MIB, 20, ahead) < 1e13


def test_a_matrix_counts_its_packed_bytes_and_refuses_more_rows_than_it_was_made_for(pool):
    matrix = _native.ProbeMatrix(pool, "generic", 48, 256, 3)
    assert matrix.bytes == _native.packed_bytes(2, 48, 256)
    assert matrix.run(1) > 0 and matrix.run(3) > 0
    for rows in (0, 4):
        with pytest.raises(ValueError, match="so many rows"):
            matrix.run(rows)


def test_arguments_are_checked(pool):
    memory = _native.ProbeMemory(MIB, False, pool)
    for size, passes in ((MIB, 1), (1, 1), (MIB // 2, 0)):
        with pytest.raises(ValueError, match="does not hold that much"):
            _native.probe_read(pool, "generic", memory, size, passes, False)
    with pytest.raises(ValueError, match="at least one round"):
        _native.probe_peak(pool, "generic", True, 0)
    with pytest.raises(ValueError, match="does not run"):
        _native.probe_peak(pool, "abacus", True, 1)


def test_the_tables_and_the_json_say_the_same(monkeypatch):
    small = {"OUTPUTS": 64, "INPUTS": 256, "ROWS": (1, 3), "ROUNDS": 1000, "READ_BYTES": 1, "TRIES": 1}
    for name, value in (small | {"MIN_MEMORY": 4 * MIB, "MAX_MEMORY": 4 * MIB}).items():
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(probe, "cache_bytes", lambda level, root=None: MIB)
    done = inline("bench", "probe", "--num-threads", 2, "--json")
    assert done.returncode == 0, done
    assert done.stderr.splitlines()[-1] == "bench probe: 5 of 5 parts"
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    reads = {(rate["level"], rate["threads"], rate["page_bytes"]) for rate in report["reads"]}
    assert len(reads) == 12 and {level for level, *_ in reads} == {"L2", "L3", "memory"}
    assert [peak["threads"] for peak in report["peaks"]] == [1, 2] and [row["rows"] for row in report["gemm"]] == [1, 3]
    for row in report["gemm"]:
        assert row["tera_operations_per_second"] == pytest.approx(
            2 * row["rows"] * 64 * 256 / row["milliseconds"] / 1e9, rel=1e-6
        )
    assert all(word in "\n".join(table) for word in ("L2", "L3", "memory", "int8", "4-bit matrix", "3 rows"))
    assert report["machine"]["cpus"] >= 1


def test_what_is_wrong_is_one_line():
    refuses(inline("bench", "probe", "--num-threads", "-1"), 2, "--num-threads")
    refuses(inline("bench", "probe", "--isa", "abacus"), 1, "abacus")


def test_caches_have_the_size_that_the_system_says(tmp_path):
    for index, (level, size) in enumerate([("1", "48K"), ("2", "2048K"), ("x", "1K"), ("3", "many")]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    assert probe.cache_bytes(2, tmp_path) == 2 * MIB
    assert probe.cache_bytes(3, tmp_path) == probe.cache_bytes(3, tmp_path / "none") == 32 * MIB
