"""Faults injected at every hop: the requests they concern end with ERROR, the others are untouched, all goes on."""

import pytest
from scripted_executor import executor_of, request, scripted_engine

from yeoul.errors import EngineDeadError, EngineError
from yeoul.sched.policies import Policies
from yeoul.step import RowStatus
from yeoul.types import FinishReason

NEIGHBOUR = ("neighbour", [4, 5, 6])


def run(engine, limit=300):
    tokens, reasons, errors, texts = {}, {}, {}, {}
    for _ in range(limit):
        if not engine.has_work:
            break
        for output in engine.step().outputs:
            key = output.request_id, output.index
            assert key not in reasons
            tokens[key] = (*tokens.get(key, ()), *output.token_ids)
            texts[key] = texts.get(key, "") + output.text
            if output.finish_reason is not None:
                reasons[key], errors[key] = output.finish_reason, output.error
        engine.check_books()
    assert engine.stats().kv_used_blocks == 0 and not engine.has_work
    return tokens, reasons, errors, texts


@pytest.fixture
def alone():
    engine = scripted_engine()
    engine.add(request(*NEIGHBOUR, max_tokens=20))
    tokens, reasons, _, texts = run(engine)
    key = ("neighbour", 0)
    return tokens[key], reasons[key], texts[key]


def assert_neighbour(alone, outcome):
    tokens, reasons, _, texts = outcome
    key = ("neighbour", 0)
    assert (tokens[key], reasons[key], texts[key]) == alone


@pytest.mark.parametrize("stop", ["explode on open", "explode on push"])
def test_a_fault_in_the_detokenizer_ends_its_sequence_only(alone, stop):
    engine = scripted_engine()
    engine.add(request("bad", [1, 2], max_tokens=20, stop=(stop,)))
    engine.add(request(*NEIGHBOUR, max_tokens=20))
    outcome = run(engine)
    assert_neighbour(alone, outcome)
    assert outcome[1]["bad", 0] is FinishReason.ERROR
    assert "scripted" not in outcome[2]["bad", 0]
    assert len(outcome[0].get(("bad", 0), ())) == (0 if stop == "explode on open" else 3)
    assert engine.stats().finished["error"] == 1


@pytest.mark.parametrize("status", [RowStatus.NAN, RowStatus.ERROR])
def test_a_bad_row_ends_its_sequence_only(alone, status):
    engine = scripted_engine()
    executor_of(engine).row_status = lambda plan, row: status if row.slot == 0 and plan.step_id == 4 else RowStatus.OK
    engine.add(request("bad", [1, 2], max_tokens=20))
    engine.add(request(*NEIGHBOUR, max_tokens=20))
    outcome = run(engine)
    assert_neighbour(alone, outcome)
    assert outcome[1]["bad", 0] is FinishReason.ERROR and outcome[2]["bad", 0]
    assert len(outcome[0]["bad", 0]) == 4


def fail_once(at):
    def before(plan):
        if plan.step_id == at:
            raise EngineError("scripted fault")

    return before


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_failed_execution_ends_the_step_and_not_the_queue(alone, at):
    engine = scripted_engine(max_num_seqs=2, policies=Policies(fork=False))
    executor_of(engine).before = fail_once(at)
    engine.add(request("a", [1] * 80, max_tokens=20, n=2))
    engine.add(request(*NEIGHBOUR, max_tokens=20))
    outcome = run(engine)
    assert_neighbour(alone, outcome)
    assert outcome[1]["a", 0] is FinishReason.ERROR
    assert outcome[1]["a", 1] is (FinishReason.ERROR if at else FinishReason.LENGTH)
    assert "scripted" not in outcome[2]["a", 0]
    assert engine.stats().alive


@pytest.mark.parametrize("method", ["schedule", "commit"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_fault_in_the_scheduler(alone, monkeypatch, method, after):
    engine = scripted_engine(max_num_seqs=1)
    executor_of(engine).in_doubt = True
    real, calls = getattr(engine._scheduler, method), []

    def fault(*args):
        calls.append(None)
        if len(calls) == after + 1:
            raise RuntimeError("scripted fault")
        return real(*args)

    monkeypatch.setattr(engine._scheduler, method, fault)
    engine.add(request("a", [1, 2], max_tokens=20))
    engine.add(request(*NEIGHBOUR, max_tokens=20))
    outcome = run(engine)
    assert outcome[1]["a", 0] is FinishReason.ERROR
    assert_neighbour(alone, outcome)


@pytest.mark.parametrize("method", ["grow", "match", "start", "publish", "release_window"])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_fault_in_the_kv_manager_leaves_no_block_behind(monkeypatch, method, after):
    engine = scripted_engine(max_num_seqs=2)
    executor_of(engine).in_doubt = True
    real, calls = getattr(engine._kv, method), []

    def fault(*args):
        calls.append(None)
        if len(calls) == after + 1:
            raise RuntimeError("scripted fault")
        return real(*args)

    monkeypatch.setattr(engine._kv, method, fault)
    for i in range(7):
        engine.add(request(f"r{i}", [i] * 30, max_tokens=10))
    _, reasons, _, _ = run(engine)
    assert len(reasons) == 7 and FinishReason.ERROR in reasons.values()
    assert reasons["r6", 0] is FinishReason.LENGTH


def test_sequences_that_ended_in_a_step_that_fails_later_get_their_terminal_output(monkeypatch):
    engine = scripted_engine()
    executor_of(engine).in_doubt = True
    real = engine._scheduler._commit_row

    def fault(sequence, row, result):
        if sequence.request.request_id == "b":
            raise RuntimeError("scripted fault")
        return real(sequence, row, result)

    monkeypatch.setattr(engine._scheduler, "_commit_row", fault)
    engine.add(request("a", [1], max_tokens=1))
    engine.add(request("b", [1], max_tokens=9))
    _, reasons, _, _ = run(engine)
    assert reasons == {("a", 0): FinishReason.ERROR, ("b", 0): FinishReason.ERROR}


def test_books_that_do_not_balance_after_a_fault_kill_the_engine():
    engine = scripted_engine()
    executor_of(engine).before = fail_once(2)
    engine.add(request("a", [1] * 20, max_tokens=9))
    engine.step()
    engine._kv.pools[0].allocate(1)
    engine.step()
    with pytest.raises(EngineDeadError, match="books"):
        engine.step()


def test_an_interrupt_in_a_step_leaves_a_usable_engine(alone):
    engine = scripted_engine()

    def interrupt(plan):
        if plan.step_id == 3:
            raise KeyboardInterrupt

    executor_of(engine).before = interrupt
    engine.add(request("a", [1], max_tokens=9))
    for _ in range(3):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_work
    assert [output.finish_reason for output in engine.step().outputs] == [FinishReason.ERROR]
    engine.add(request(*NEIGHBOUR, max_tokens=20))
    assert_neighbour(alone, run(engine))
