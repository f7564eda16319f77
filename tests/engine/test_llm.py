"""LLM: prompts of all forms, order, refusals before any work; and whole engines built from tiny model files."""

import msgspec
import pytest
from scripted_executor import executor_of, request, scripted_engine

from yeoul.config import EngineConfig
from yeoul.engine.build import build_engine, resolve
from yeoul.engine.llm import LLM
from yeoul.errors import ConfigError, ContextLengthError, ModelFileError, RequestError
from yeoul.types import FinishReason, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def scripted() -> LLM:
    return LLM.from_engine(scripted_engine())


def test_outputs_come_in_the_order_of_the_prompts_whatever_their_length():
    llm = scripted()
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (30, 1, 9)]
    outputs = llm.generate(["abc", "de", [1, 2, 3, 4]], params)
    assert [output.prompt for output in outputs] == ["abc", "de", None]
    assert [output.prompt_token_ids for output in outputs] == [[97, 98, 99], [100, 101], [1, 2, 3, 4]]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [30, 1, 9]
    again = llm.generate([[1, 2, 3, 4]], params[2:])
    assert again[0].outputs[0].text == outputs[2].outputs[0].text != ""


@pytest.mark.parametrize("prompts", ["ab", ["ab"], [97, 98], [[97, 98]], (97, 98)])
def test_one_prompt_in_every_form(prompts):
    (output,) = scripted().generate(prompts, GREEDY)
    assert output.prompt_token_ids == [97, 98]
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_no_prompts_no_outputs():
    assert scripted().generate([]) == []


def test_n_logprobs_and_defaults():
    llm = scripted()
    (output,) = llm.generate("ab", SamplingParams(n=3, logprobs=0, max_tokens=5, seed=4, ignore_eos=True))
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert [len(one.logprobs) for one in output.outputs] == [5, 5, 5]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    (output,) = llm.generate("ab")
    assert len(output.outputs) == 1


def test_refusals_come_before_any_work():
    llm = scripted()
    for prompts, params, error, message in (
        (["ok", ""], GREEDY, RequestError, "empty"),
        (["ok", [1] * 600], GREEDY, ContextLengthError, "600 tokens"),
        (["ok", [251]], GREEDY, RequestError, "251"),
        (["ok", "ok"], [GREEDY], RequestError, "1 SamplingParams for 2 prompts"),
    ):
        with pytest.raises(error, match=message):
            llm.generate(prompts, params)
    assert executor_of(llm.engine).plans == [] and not llm.engine.has_work


def test_an_interrupt_leaves_nothing_behind():
    llm = scripted()

    def interrupt(plan):
        if plan.step_id == 2:
            raise KeyboardInterrupt

    executor_of(llm.engine).before = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50))
    assert not llm.engine.has_work and llm.engine.stats().kv_used_blocks == 0
    assert len(llm.generate("ab", GREEDY)[0].outputs[0].token_ids) == 4


def test_a_sequence_that_fails_says_so_and_the_others_are_returned():
    llm = scripted()
    bad = msgspec.structs.replace(GREEDY, stop=("explode on push",), max_tokens=9)
    good, failed = llm.generate(["a", "b"], [GREEDY, bad])
    assert good.outputs[0].finish_reason is FinishReason.LENGTH
    assert failed.outputs[0].finish_reason is FinishReason.ERROR and failed.outputs[0].error


def test_close_and_with():
    with scripted() as llm:
        executor = executor_of(llm.engine)
    assert executor.closed
    llm.close()


def test_unknown_options_are_refused_by_name():
    with pytest.raises(ConfigError, match="there is no option 'max_seqs'") as refusal:
        LLM("nothing", max_seqs=3)
    assert "max_num_seqs" in refusal.value.hint
    with pytest.raises(ConfigError, match="max_num_seqs must be"):
        LLM("nothing", max_num_seqs=0)
    with pytest.raises(ModelFileError):
        LLM("no such model")


def test_resolve_leaves_nothing_to_choose(monkeypatch):
    monkeypatch.setenv("YEOUL_ISA", "generic")
    config = resolve(EngineConfig(model="m"))
    assert config.isa == "generic" and config.kv_cache_dtype == "f16"
    assert config.num_threads >= 1 and config.max_num_batched_tokens == 512 and config.seed
    assert resolve(EngineConfig(model="m")).seed != config.seed
    assert config.v_cache_dtype == "f16"
    assert resolve(EngineConfig(model="m", kv_cache_dtype="int8")).v_cache_dtype == "int8"
    assert resolve(EngineConfig(model="m", v_cache_dtype="int8")).kv_cache_dtype == "f16"
    chosen = EngineConfig(model="m", isa="avx2", num_threads=3, max_num_batched_tokens=9, kv_cache_dtype="f32", seed=5)
    resolved = resolve(chosen)
    for name in ("isa", "num_threads", "max_num_batched_tokens", "kv_cache_dtype", "seed"):
        assert getattr(resolved, name) == getattr(chosen, name)


@pytest.mark.parametrize(
    ("family", "dtypes", "warned"),
    [("qwen2", ("int8", "auto"), 1), ("qwen2", ("f16", "int8"), 0), ("llama", ("fp8_e4m3", "auto"), 0)],
)
def test_8_bit_keys_of_a_model_with_key_bias_are_warned_of(tiny_paths, caplog, family, dtypes, warned):
    options = dict(executor="reference", kv_cache_dtype=dtypes[0], v_cache_dtype=dtypes[1])
    with LLM(str(tiny_paths[family]), **options) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=3))
    assert sum("keys of this model have a bias" in record.message for record in caplog.records) == warned


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_batched_chunked_and_preempted_replies_equal_solo_ones_on_a_real_model(tiny_paths, family):
    """The reference executor in float64 is not bit-exact across batches, but greedy tokens of a tiny model are."""
    options = dict(executor="reference-exact", kv_cache_dtype="f32", seed=1)
    prompts = [[5, 6, 7], [8] * 20, [9, 10] * 15, list(range(20, 60))]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(tiny_paths[family]), **options) as llm:
        solo = [llm.generate([prompt], params)[0].outputs[0] for prompt in prompts]
    with LLM(str(tiny_paths[family]), num_kv_blocks=6, max_num_batched_tokens=24, **options) as llm:
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
        stats = llm.engine.stats()
        assert stats.preemptions > 0 and stats.kv_used_blocks == 0
        llm.engine.check_books()
    assert [one.token_ids for one in together] == [one.token_ids for one in solo]
    assert [one.text for one in together] == [one.text for one in solo]


def test_chat_uses_the_models_template(tiny_qwen2):
    with LLM(str(tiny_qwen2), executor="reference", max_num_seqs=2) as llm:
        (output,) = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=3, temperature=0.0))
        both = llm.chat([[{"role": "user", "content": text}] for text in ("hello", "other")], GREEDY)
        with pytest.raises(RequestError, match="no messages"):
            llm.chat([])
    assert "hello" in output.prompt and output.prompt_token_ids == both[0].prompt_token_ids
    assert output.outputs[0].finish_reason is not None
    assert "other" in both[1].prompt


def test_build_engine_names_the_model_logs_its_sizes_and_takes_an_executor(tiny_llama, tmp_path, caplog):
    caplog.set_level("INFO", "yeoul")
    made = []

    def factory(model, config, limits):
        from yeoul.exec import create_executor

        made.append(limits)
        return create_executor(model, config, limits)

    path = tmp_path / "steps.jsonl"
    engine = build_engine(
        EngineConfig(
            model=str(tiny_llama), executor="reference", num_kv_blocks=9, executor_factory=factory, step_log=str(path)
        )
    )
    engine.add(request("a", [1, 2, 3], max_tokens=2))
    while engine.has_work:
        engine.step()
    engine.close()
    assert engine.info.model_name == tiny_llama.stem and engine.info.architecture == "llama"
    assert engine.info.max_model_len == engine.info.num_kv_tokens == 128
    assert made[0].num_blocks == (9,) and made[0].max_num_batched_tokens == 512
    assert "--num-kv-blocks" in caplog.text and "max_model_len: 128" in caplog.text
    assert b'"config":{"model"' in path.read_bytes().splitlines()[0]
    with pytest.raises(ConfigError, match="not callable"):
        build_engine(EngineConfig(model=str(tiny_llama), executor_factory=3))
