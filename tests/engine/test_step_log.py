"""The step log: that it says what happened, keeps its bounds, dumps plans after a fault, and survives its own."""

import json

import pytest
from scripted_executor import executor_of, request, scripted_engine

from yeoul.engine import step_log
from yeoul.engine.step_log import ROW_COLUMNS, EventRecord, StepRecord
from yeoul.errors import ConfigError, EngineError


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(engine):
    while engine.has_work:
        engine.step()


@pytest.fixture
def logged(tmp_path):
    """A tight engine's log: two requests of which one is preempted, one that is aborted."""
    path = tmp_path / "steps.jsonl"
    engine = scripted_engine(num_blocks=(5,), max_num_batched_tokens=64, step_log=str(path))
    for name, first in (("old", 0), ("new", 100)):
        engine.add(request(name, range(first, first + 28), max_tokens=8, seed=9))
    run(engine)
    engine.add(request("gone", [1] * 10, max_tokens=50))
    engine.step()
    engine.abort("gone")
    run(engine)
    engine.close()
    return records(path)


def test_the_first_line_is_the_header(logged):
    header = logged[0]
    assert header["kind"] == "header" and header["version"] == 1
    assert header["config"] == {"seed": 1} and header["seed"] == 1
    assert header["row_columns"] == list(ROW_COLUMNS)
    assert [record["kind"] for record in logged].count("header") == 1


def test_steps_say_who_computed_what(logged):
    steps = [record for record in logged if record["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert steps[0]["rows"] == [["old", 0, 0, 28, 28, 1], ["new", 0, 0, 28, 28, 1]]
    assert steps[1]["rows"] == [["old", 0, 28, 1, 29, 1], ["new", 0, 28, 1, 29, 1]]
    assert steps[0]["blocks"] == [[4, 0, 0]]
    for step in steps:
        assert all(step[name] >= 0 for name in ("drain", "schedule", "execute", "commit", "emit"))
        assert step["at"] <= step["started_at"] <= step["finished_at"]
        assert step["finished_at"] - step["started_at"] <= step["execute"]
        assert sum(step["blocks"][0]) == 4


def test_preemption_and_waiting_show(logged):
    steps = [record for record in logged if record["kind"] == "step"]
    (preempting,) = [step for step in steps if step["preempted"]]
    assert preempting["preempted"] == [["new", 0, 32, 0, "old", 0]]
    assert preempting["num_waiting"] == 1 and preempting["waiting"] == ["new"]
    assert preempting["wait_reason"] == "preemption"
    after = steps[steps.index(preempting) + 1]
    assert after["wait_reason"] == "blocks"
    assert all(step["wait_reason"] is None for step in steps if not step["num_waiting"])
    resumed = next(step for step in steps[steps.index(preempting) :] if step["rows"][-1][0] == "new")
    assert resumed["rows"][-1][2:5] == [16, 17, 33]  # Its first block was still cached.


def test_events_tell_the_life_of_a_request(logged):
    events = [record for record in logged if record["kind"] == "event"]
    lives = {name: [event["event"] for event in events if event["request"] == name] for name in ("old", "new", "gone")}
    assert lives["old"] == lives["new"] == ["arrive", "admit", "first_schedule", "deliver", "finish"]
    assert lives["gone"] == ["arrive", "admit", "first_schedule", "deliver", "abort", "finish"]
    by_name = {event["event"]: event for event in events if event["request"] == "gone"}
    assert by_name["arrive"]["num_tokens"] == 10
    assert isinstance(by_name["admit"]["seed"], int)
    assert by_name["finish"]["reason"] == "abort" and by_name["finish"]["num_tokens"] == 1
    assert [event["seed"] for event in events if event["event"] == "admit"][:2] == [9, 9]
    for name in lives:
        times = [event["at"] for event in events if event["request"] == name]
        assert times == sorted(times)


def test_the_ring_is_bounded_and_works_without_a_file(monkeypatch):
    monkeypatch.setattr(step_log, "RING_RECORDS", 20)
    engine = scripted_engine()
    engine.add(request("a", [1], max_tokens=100))
    run(engine)
    assert len(engine.step_log.records) == 20
    last = engine.step_log.records[-1]
    assert isinstance(last, StepRecord) and last.step == 99
    assert isinstance(engine.step_log.records[-2], EventRecord)


def test_a_fault_dumps_the_last_plans_into_the_log(tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = scripted_engine(step_log=str(path))

    def before(plan):
        if plan.step_id == 80:
            raise EngineError("scripted fault")

    executor_of(engine).before = before
    engine.add(request("a", [1, 2], max_tokens=200))
    run(engine)
    engine.close()
    (crash,) = [record for record in records(path) if record["kind"] == "crash"]
    assert crash["error"] == "EngineError: scripted fault"
    assert [plan["step_id"] for plan in crash["plans"]] == list(range(17, 81))
    assert crash["plans"][0]["rows"][0]["num_tokens"] == 1


def test_without_a_log_file_the_dump_is_a_private_file_and_there_are_few(crash_folder):
    engine = scripted_engine()

    def before(plan):
        raise EngineError("scripted fault")

    executor_of(engine).before = before
    for i in range(10):
        engine.add(request(f"r{i}", [1, 2]))
        run(engine)
    dumps = sorted(crash_folder.glob("yeoul-crash-*.jsonl"))
    assert len(dumps) == step_log.MAX_CRASH_FILES
    assert all(dump.stat().st_mode & 0o077 == 0 for dump in dumps)
    assert [record["kind"] for record in records(dumps[0])] == ["header", "crash"]


def test_a_log_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written"):
        scripted_engine(step_log=str(tmp_path / "no folder" / "log"))


def test_a_full_disk_ends_the_log_and_not_the_engine(tmp_path, caplog):
    engine = scripted_engine(step_log="/dev/full")
    engine.add(request("a", [1], max_tokens=3))
    run(engine)
    engine.idle()
    engine.add(request("b", [1], max_tokens=3))
    run(engine)
    engine.close()
    assert engine.stats().finished["length"] == 2
    assert "the step log ends here" in caplog.text
