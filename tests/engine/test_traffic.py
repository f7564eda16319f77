"""The matrix: random traffic through tight and roomy engines; every reply equals its solo run, the books balance.

Also the cases R1, R3, A1, P9 and M3 of the case list, as far as they need no real model.
"""

import random
from collections import defaultdict
from functools import cache

import pytest
from scripted_executor import FULL, VOCAB, executor_of, request, scripted_engine, window_spec

from yeoul.config import BATCHINGS, KV_ALLOCATIONS, PREEMPTION_VICTIMS, SCHEDULING_POLICIES
from yeoul.errors import CapacityError, ContextLengthError, RequestError
from yeoul.sched.policies import Policies
from yeoul.types import FinishReason, Request


class Replies:
    """What a client has after all deltas, with the promise of one terminal output per sequence checked on the way."""

    def __init__(self):
        self.text = defaultdict(str)
        self.tokens = defaultdict(list)
        self.logprobs = defaultdict(list)
        self.reason = {}
        self.last = {}

    def take(self, outputs):
        for output in outputs:
            key = (output.request_id, output.index)
            assert key not in self.reason, f"{key} got something after its terminal output"
            self.text[key] += output.text
            self.tokens[key] += output.token_ids
            self.logprobs[key] += output.logprobs
            assert output.num_output_tokens == len(self.tokens[key])
            self.last[key] = output
            if output.finish_reason is not None:
                self.reason[key] = output.finish_reason

    def of(self, key):
        return self.text[key], tuple(self.tokens[key]), tuple(self.logprobs[key]), self.reason.get(key)


def drive(engine, arrivals=(), aborts=None, limit=5000):
    """Run to the end. `arrivals`: (step, Request), ascending; `aborts`: request id -> step."""
    replies, pending, aborts = Replies(), list(arrivals), dict(aborts or {})
    for step in range(limit):
        while pending and pending[0][0] <= step:
            engine.add(pending.pop(0)[1])
        for request_id in [name for name, when in aborts.items() if when <= step]:
            engine.abort(request_id)
            del aborts[request_id]
        replies.take(engine.step().outputs)
        engine.check_books()
        if not pending and not engine.has_work:
            break
    stats = engine.stats()
    assert (stats.kv_used_blocks, stats.num_running, stats.num_waiting, stats.num_waiting_tokens) == (0, 0, 0, 0)
    return replies


SPECS = {"full": (FULL,), "window": (window_spec(24),), "mixed": (FULL, window_spec(24)), "two": (window_spec(5), FULL)}


@cache
def solo_reply(kind, prompt, index, seed, temperature, max_tokens, stop, ignore_eos, n, logprobs):
    engine = scripted_engine(specs=SPECS[kind], num_blocks=(99,) * len(SPECS[kind]), max_num_batched_tokens=256)
    params = dict(seed=seed, temperature=temperature, max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)
    replies = drive(engine, [(0, request("solo", prompt, n=n, logprobs=logprobs, **params))])
    assert engine.stats().preemptions == 0
    return replies.of(("solo", index))


def solo(kind, made: Request, index):
    p = made.params
    key = (p.seed, p.temperature, p.max_tokens, p.stop, p.ignore_eos, p.n, p.logprobs)
    return solo_reply(kind, tuple(made.prompt_token_ids), index, *key)


def random_traffic(rng, count):
    """Requests of all kinds, their arrivals, and who is aborted when."""
    arrivals, aborts, step = [], {}, 0
    for i in range(count):
        step += rng.choice([0, 0, 1, 3, 10])
        made = request(
            f"r{i}",
            [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 15, 16, 17, 33, 60]))],
            n=rng.choice([1, 1, 1, 2, 3]),
            max_tokens=rng.choice([1, 2, 16, 30]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.5,
            stop=rng.choice([(), (), ("<1", "<20>"), ("><2",)]),
            logprobs=rng.choice([None, 0]),
        )
        arrivals.append((step, made))
        if rng.random() < 0.15:
            aborts[made.request_id] = step + rng.choice([0, 1, 2, 8, 25])
    return arrivals, aborts


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("blocks", [7, 12, 64])
def test_every_reply_equals_its_solo_run(kind, chunk, blocks):
    specs = SPECS[kind]
    rng = random.Random(f"{kind} {chunk} {blocks}")
    arrivals, aborts = random_traffic(rng, 16)
    engine = scripted_engine(
        specs=specs, num_blocks=(blocks,) * len(specs), max_num_seqs=rng.choice([2, 5, 8]), max_num_batched_tokens=chunk
    )
    replies = drive(engine, arrivals, aborts)
    sequences = [(made, index) for _, made in arrivals for index in range(made.params.n)]
    assert len(replies.reason) == len(sequences)
    for made, index in sequences:
        text, tokens, logprobs, reason = replies.of((made.request_id, index))
        expected = solo(kind, made, index)
        if reason is FinishReason.ABORT:
            assert made.request_id in aborts
            assert expected[1][: len(tokens)] == tokens
            assert text == "".join(f"<{token}>" for token in tokens)
        else:
            assert (text, tokens, logprobs, reason) == expected
    finished = engine.stats().finished
    assert sum(finished.values()) == len(sequences) and finished["error"] == 0


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("round_", range(8))
def test_no_technique_changes_a_reply(kind, round_):
    """Every technique at random; tests/matrix has the pairs of them on real kernels."""
    rng = random.Random(f"{kind} {round_}")
    arrivals, aborts = random_traffic(rng, 16)
    policies = Policies(
        batching=rng.choice(BATCHINGS),
        order=rng.choice(SCHEDULING_POLICIES),
        victim=rng.choice(PREEMPTION_VICTIMS),
        fork=rng.random() < 0.7,
        ageing_seconds=rng.choice([0.0, 0.001, 60.0]),
    )
    engine = scripted_engine(
        specs=SPECS[kind],
        num_blocks=(rng.choice([8, 12, 40]),) * len(SPECS[kind]),
        max_num_seqs=rng.choice([2, 5, 8]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        prefix_caching=rng.random() < 0.7,
        allocation=rng.choice(KV_ALLOCATIONS),
        policies=policies,
        swap_blocks=rng.choice([0, 6, 1000]),
    )
    replies = drive(engine, arrivals, aborts)
    for made, index in [(made, index) for _, made in arrivals for index in range(made.params.n)]:
        text, tokens, logprobs, reason = replies.of((made.request_id, index))
        expected = solo(kind, made, index)
        if reason is FinishReason.ABORT:
            assert made.request_id in aborts and expected[1][: len(tokens)] == tokens
        else:
            assert (text, tokens, logprobs, reason) == expected


def test_the_matrix_does_preempt():
    """Proof that the tight pools above exercise what they are meant to."""
    arrivals, _ = random_traffic(random.Random(3), 16)
    engine = scripted_engine(num_blocks=(7,), max_num_batched_tokens=16)
    drive(engine, arrivals)
    assert engine.stats().preemptions > 1


def test_r1_output_after_preemption_is_the_same_and_nothing_is_sent_twice():
    requests = [request(f"r{i}", range(i, i + 10), max_tokens=40) for i in range(4)]
    tight, roomy = scripted_engine(num_blocks=(6,), max_model_len=64), scripted_engine(max_model_len=64)
    got, expected = (drive(engine, [(0, made) for made in requests]) for engine in (tight, roomy))
    assert tight.stats().preemptions > 0 and roomy.stats().preemptions == 0
    for made in requests:
        assert got.of((made.request_id, 0)) == expected.of((made.request_id, 0))
        assert len(got.tokens[made.request_id, 0]) == 40


def test_r3_what_can_never_fit_is_refused_at_once_and_the_small_one_is_served():
    engine = scripted_engine(num_blocks=(5,), max_model_len=256)
    with pytest.raises(ContextLengthError, match="100 tokens; at most 64") as refusal:
        engine.check(request("big", range(100)))
    assert refusal.value.hint and refusal.value.status == 400
    replies = drive(engine, [(0, request("small", range(10), max_tokens=5))], limit=20)
    assert replies.reason["small", 0] is FinishReason.LENGTH
    replies = drive(engine, [(0, request("long", range(40), max_tokens=60))], limit=80)
    assert replies.reason["long", 0] is FinishReason.LENGTH
    assert len(replies.tokens["long", 0]) == 24 and engine.stats().preemptions == 0


def test_r3_unchecked_it_ends_with_an_error_instead_of_blocking_the_queue():
    engine = scripted_engine(num_blocks=(5,), max_model_len=256)
    replies = drive(engine, [(0, request("big", range(100), n=2)), (0, request("small", range(10), max_tokens=5))])
    assert replies.reason["big", 0] is replies.reason["big", 1] is FinishReason.ERROR
    assert "100 tokens" in replies.last["big", 0].error
    assert replies.reason["small", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_a1_an_abort_frees_everything_within_one_step(after):
    engine = scripted_engine(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=4096)
    for round_ in range(10):
        engine.add(request(f"r{round_}", [round_] * 60, max_tokens=400))
        for _ in range(after):
            engine.step()
        engine.abort(f"r{round_}")
        outputs = engine.step().outputs
        assert [output.finish_reason for output in outputs] == [FinishReason.ABORT]
        assert engine.stats().kv_used_blocks == 0 and not engine.has_work
    replies = drive(engine, [(0, request("next", [1, 2, 3], max_tokens=3))])
    assert replies.of(("next", 0)) == solo("full", request("next", [1, 2, 3], max_tokens=3), 0)


def test_aborting_what_is_unknown_or_finished_does_nothing():
    engine = scripted_engine()
    replies = drive(engine, [(0, request("a", [1], max_tokens=1))], {"nobody": 0, "a": 0})
    assert replies.reason["a", 0] is FinishReason.ABORT
    engine.abort("a")
    assert engine.step().outputs == []


def test_p9_samples_differ_and_unseeded_requests_are_not_frozen():
    def tokens(engine, name, **params):
        replies = drive(engine, [(0, request(name, [1, 2], n=8, max_tokens=8, temperature=1.0, **params))])
        return [tuple(replies.tokens[name, index]) for index in range(8)]

    engine = scripted_engine(seed=1)
    first, second = tokens(engine, "a"), tokens(engine, "b")
    assert len({*first, *second}) == 16
    assert tokens(engine, "c", seed=7) == tokens(engine, "d", seed=7) != first
    assert tokens(scripted_engine(seed=1), "a") == first
    assert tokens(scripted_engine(seed=2), "a") != first
    states = [row.state for plan in executor_of(engine).plans for row in plan.rows if row.state is not None]
    assert len({(state.seed, state.sequence_index) for state in states}) == len(states) - 8


def test_m3_counters_add_up_whatever_was_preempted():
    rng = random.Random(5)
    requests = [
        request(f"r{i}", [rng.randrange(VOCAB) for _ in range(20 + i)], n=1 + i % 3, max_tokens=20) for i in range(8)
    ]
    engine = scripted_engine(num_blocks=(7,), max_num_batched_tokens=16)
    seen = [engine.stats()]
    for made in requests:
        engine.add(made)
    replies = Replies()
    while engine.has_work:
        replies.take(engine.step().outputs)
        seen.append(engine.stats())
    last = seen[-1]
    assert last.preemptions > 0
    assert last.prompt_tokens == sum(len(made.prompt_token_ids) for made in requests)
    assert last.generation_tokens == sum(output.num_output_tokens for output in replies.last.values())
    assert last.finished["length"] == sum(made.params.n for made in requests)
    for name in ("prompt_tokens", "generation_tokens", "preemptions", "num_steps"):
        values = [getattr(stats, name) for stats in seen]
        assert values == sorted(values)


def test_stop_strings_and_end_tokens():
    def reply(**params):
        return drive(scripted_engine(), [(0, request("a", [9, 9], max_tokens=500, **params))])

    plain = reply()
    tokens = plain.tokens["a", 0]
    assert plain.text["a", 0] == "".join(f"<{token}>" for token in tokens)
    stopped = reply(stop=(f"<{tokens[5]}>",))
    first = tokens.index(tokens[5])
    assert stopped.text["a", 0] == "".join(f"<{token}>" for token in tokens[:first])
    assert stopped.reason["a", 0] is FinishReason.STOP and len(stopped.tokens["a", 0]) == first + 1
    ended = reply(ignore_eos=False, stop=("zzz",))
    assert ended.tokens["a", 0] == tokens[: tokens.index(0) + 1]
    assert ended.text["a", 0] == "".join(f"<{token}>" for token in tokens[: tokens.index(0)])
    assert ended.reason["a", 0] is FinishReason.STOP


@pytest.mark.parametrize("token_id", [-1, VOCAB, 999999, 2**70, True, 1.5, "1", None])
def test_v1_token_ids_outside_the_vocabulary_are_refused_by_name(token_id):
    with pytest.raises(RequestError, match="is not in the vocabulary") as refusal:
        scripted_engine().check(request("a", [1, token_id]))
    assert str(token_id)[:10] in str(refusal.value)


def test_the_last_token_id_is_accepted_and_an_empty_prompt_is_not():
    scripted_engine().check(request("a", [VOCAB - 1, 0]))
    with pytest.raises(RequestError, match="empty"):
        scripted_engine().check(request("a", []))


def test_v11_the_limit_names_both_numbers():
    engine = scripted_engine(max_model_len=64)
    engine.check(request("a", [1] * 63))
    with pytest.raises(ContextLengthError, match="64 tokens; at most 64"):
        engine.check(request("a", [1] * 64))


def test_the_queue_is_bounded_by_tokens_and_an_empty_one_takes_anything():
    engine = scripted_engine(max_num_seqs=1, max_waiting_tokens=100)
    engine.check(request("first", [1] * 200))
    engine.add(request("first", [1] * 90, max_tokens=50))
    with pytest.raises(CapacityError) as refusal:
        engine.check(request("b", [1] * 11))
    assert refusal.value.status == 429 and refusal.value.retry_after >= 1
    engine.check(request("b", [1] * 10))
    with pytest.raises(CapacityError):
        engine.check(request("b", [1] * 10, n=2))
    engine.step()
    engine.step()
    assert engine.stats().num_waiting_tokens == 0
    engine.check(request("b", [1] * 200))


def test_request_ids_in_use_are_refused_and_the_first_one_goes_on():
    engine = scripted_engine()
    engine.add(request("a", [1], max_tokens=5))
    engine.step()
    engine.add(request("a", [2], max_tokens=5))
    outputs = engine.step().outputs
    assert [output.error for output in outputs if output.error] == ["request id a is in use"]
    assert [output.token_ids for output in outputs if output.token_ids]
