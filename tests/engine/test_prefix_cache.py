"""The prefix cache seen from outside: the cases X1, X3, X5, M1 and M3 of the case list, on the scripted executor."""

import random

import msgspec
import pytest
from scripted_executor import FULL, VOCAB, request, scripted_engine, window_spec
from test_traffic import drive

from yeoul.types import FinishReason

SPECS = {"full": (FULL,), "mixed": (FULL, window_spec(24))}


def engine_of(kind="full", blocks=99, **options):
    return scripted_engine(specs=SPECS[kind], num_blocks=(blocks,) * len(SPECS[kind]), **options)


def ask(engine, made):
    replies = drive(engine, [(0, made)])
    key = (made.request_id, 0)
    return replies.of(key), replies.last[key].num_cached_tokens, replies.last[key].num_prompt_tokens


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_x1_m1_sent_twice_gives_the_same_and_computes_something(kind, length):
    engine = engine_of(kind)
    cold, cached, prompt = ask(engine, request("a", range(length), max_tokens=4))
    warm, cached_again, prompt_again = ask(engine, request("b", range(length), max_tokens=4))
    assert cold == warm and prompt == prompt_again == length
    assert cached == 0 and cached_again == (length - 1) // 16 * 16
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (2 * length, cached_again)
    assert stats.prompt_tokens == 2 * length


def test_x3_only_equal_salts_share():
    engine, prompt = engine_of(), range(40)

    def cached(name, salt):
        made = msgspec.structs.replace(request(name, prompt, max_tokens=4), cache_salt=salt)
        reply, number, _ = ask(engine, made)
        assert reply == ask(engine_of(), made)[0]
        return number

    assert [cached("a", None), cached("b", "s"), cached("c", "t"), cached("d", "")] == [0, 0, 0, 0]
    assert [cached("e", None), cached("f", "s"), cached("g", "t"), cached("h", "")] == [32, 32, 32, 32]


def test_output_is_cached_too_for_the_next_turn():
    engine = engine_of()
    (_, tokens, _, _), _, _ = ask(engine, request("a", range(10), max_tokens=40))
    _, cached, _ = ask(engine, request("b", [*range(10), *tokens, 1, 2, 3], max_tokens=1))
    assert cached == 48


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("seed", range(12))
def test_x5_answers_do_not_depend_on_what_ran_before(kind, seed):
    """Warm-ups that end by stop string, abort and length in mid-block, then targets that share their beginnings."""
    rng = random.Random(seed)
    engine = engine_of(kind, blocks=rng.choice([14, 99]), max_num_batched_tokens=rng.choice([3, 16, 64]))
    texts = [[rng.randrange(VOCAB) for _ in range(70)] for _ in range(2)]

    def some(name, **params):
        return request(name, rng.choice(texts)[: rng.randrange(1, 70)], max_tokens=rng.randrange(1, 30), **params)

    for turn in range(5):
        warm_ups = [(rng.randrange(5), some(f"w{turn}.{i}", stop=rng.choice([(), ("<1",)]))) for i in range(4)]
        aborts = {made.request_id: step + rng.randrange(12) for step, made in warm_ups if rng.random() < 0.4}
        drive(engine, sorted(warm_ups, key=lambda item: item[0]), aborts)
        target = some(f"t{turn}")
        assert ask(engine, target)[0] == ask(engine_of(kind, prefix_caching=False), target)[0]
    assert engine.stats().prefix_cache_hits > 0


def test_m3_preemption_makes_no_hits():
    rng = random.Random(5)
    requests = [
        request(f"r{i}", [rng.randrange(VOCAB) for _ in range(20 + i)], n=1 + i % 2, max_tokens=20) for i in range(8)
    ]
    engine = engine_of(blocks=9, max_num_batched_tokens=16)
    replies = drive(engine, [(0, made) for made in requests])
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.prefix_cache_hits == 0
    assert stats.prompt_tokens == stats.prefix_cache_queries == sum(len(made.prompt_token_ids) for made in requests)
    assert stats.generation_tokens == sum(output.num_output_tokens for output in replies.last.values())


def test_m3_computed_and_found_add_up_to_the_prompts():
    rng = random.Random(6)
    shared = [rng.randrange(VOCAB) for _ in range(40)]
    engine = engine_of(blocks=12, max_num_batched_tokens=16)
    requests = [request(f"r{i}", [*shared[: 8 * i], i], max_tokens=25) for i in range(6)]
    replies = drive(engine, [(2 * i, made) for i, made in enumerate(requests)])
    stats = engine.stats()
    assert stats.prompt_tokens == sum(len(made.prompt_token_ids) for made in requests)
    assert 0 < stats.prefix_cache_hits == sum(output.num_cached_tokens for output in replies.last.values())


def test_a_failed_step_publishes_nothing():
    engine = engine_of()
    engine.add(request("a", range(40), max_tokens=4))
    engine._executor.before = lambda plan: (_ for _ in ()).throw(RuntimeError("scripted fault"))
    outputs = engine.step().outputs
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR]
    assert engine.stats().kv_cached_blocks == 0
    engine._executor.before = lambda plan: None
    engine.check_books()
    assert ask(engine, request("b", range(40), max_tokens=4))[1] == 0
