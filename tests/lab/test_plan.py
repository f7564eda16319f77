"""Plans against the engine that they are about: same bytes, same blocks, as many requests side by side."""

import pytest
from tiny import FAMILIES, K_SIZES, tiny_model

from yeoul.config import BLOCK_SIZE, EngineConfig
from yeoul.engine import build
from yeoul.engine.build import build_engine, kv_request
from yeoul.engine.loop import Engine
from yeoul.errors import ConfigError, ModelFileError
from yeoul.kv.sizing import KVSizing, size_kv
from yeoul.lab.ceiling import Machine
from yeoul.lab.plan import Plan, PlanRequest, make_plan
from yeoul.types import Request, SamplingParams

MIB = 1 << 20


def plan(model: object, *, prompt: int = 60, output: int = 20, **fields: object) -> Plan:
    own = {name: fields.pop(name) for name in ("memory", "machine") if name in fields}
    config = EngineConfig(model=str(model), **fields)
    return make_plan(PlanRequest(config=config, prompt_tokens=prompt, output_tokens=output, **own))


@pytest.fixture
def sizings(monkeypatch: pytest.MonkeyPatch) -> list[KVSizing]:
    """What the engines built in this test were sized to, on a machine with 3 GiB free."""
    seen: list[KVSizing] = []

    def noted(request: object) -> KVSizing:
        seen.append(size_kv(request))
        return seen[-1]

    monkeypatch.setattr(build, "size_kv", noted)
    monkeypatch.setattr(build, "available_memory", lambda: 3 << 30)
    return seen


def equals(made: Plan, engine: Engine, sizing: KVSizing) -> None:
    executor = engine._executor
    assert sum(one.packed_bytes for one in made.encodings if one.name != "F32") == executor._weights.num_bytes
    assert tuple(pool.num_blocks for pool in made.kv) == sizing.num_blocks == executor._limits.num_blocks
    assert tuple(pool.block_bytes for pool in made.kv) == sizing.block_bytes
    assert made.kv_bytes == sizing.total_bytes
    assert made.activation_bytes == executor._lowering.arena_bytes
    assert made.rope_bytes == sum(rope.table.nbytes for rope in executor._ropes)
    assert (made.max_model_len, made.kv_tokens) == (engine.info.max_model_len, engine.info.num_kv_tokens)
    parts = (made.weight_bytes, made.kv_bytes, made.activation_bytes, made.logit_bytes, made.rope_bytes)
    assert made.total_bytes == sum(parts)


OPTIONS = [
    {},
    {"kv_cache_memory": 2 * MIB},
    {"num_kv_blocks": 9, "max_num_batched_tokens": 100},
    {"max_model_len": 200, "max_num_seqs": 3, "kv_cache_dtype": "f32"},
    {"kv_cache_dtype": "int8", "v_cache_dtype": "fp8_e4m3"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_is_what_the_engine_takes(tiny_paths, sizings, family, options):
    made = plan(tiny_paths[family], **options)
    equals(made, build_engine(EngineConfig(model=str(tiny_paths[family]), **options)), sizings[-1])


def test_k_quants_too(tmp_path, sizings):
    path = tiny_model(tmp_path, "qwen2", **K_SIZES, weight_types={"ffn_down": "Q6_K"})
    equals(plan(path), build_engine(EngineConfig(model=str(path))), sizings[-1])


def test_a_real_model_too(sizings):
    options = {"kv_cache_memory": 64 * MIB, "max_model_len": 2048}
    made = plan("smollm2-135m", **options)
    equals(made, build_engine(EngineConfig(model="smollm2-135m", **options)), sizings[-1])
    assert made.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_holds_everything_and_the_option_gives_the_same_pool(tiny_paths, sizings, family):
    made = plan(tiny_paths[family], memory=5 * MIB)
    assert 4 * MIB < made.total_bytes <= made.memory == 5 * MIB
    equals(
        made,
        build_engine(EngineConfig(model=str(tiny_paths[family]), kv_cache_memory=made.kv_cache_memory)),
        sizings[-1],
    )


def run(engine: Engine, count: int, prompt: int, output: int) -> tuple[int, int]:
    """(most requests that ran at one time, preemptions) for `count` requests that come together."""
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    for index in range(count):
        engine.add(Request(request_id=str(index), prompt_token_ids=[7 + index % 90] * prompt, params=params))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats().num_running)
    return most, engine.stats().preemptions


@pytest.mark.parametrize("family", FAMILIES)
def test_so_many_requests_run_side_by_side(tiny_paths, family):
    # All prompts in one step, so that all are equally long; a step of windows would need a pool of its own size.
    options = {"max_num_batched_tokens": 64 if family == "gemma3" else 2000, "kv_cache_memory": MIB}
    made = plan(tiny_paths[family], prompt=100, output=412, **options)
    assert 2 <= made.requests < 20
    config = EngineConfig(model=str(tiny_paths[family]), **options)
    assert run(build_engine(config), made.requests, 100, 412) == (made.requests, 0)
    if family != "gemma3":
        most, preemptions = run(build_engine(config), made.requests + 1, 100, 412)
        assert most <= made.requests or preemptions


def test_what_limits_is_named_with_the_number_that_gives_one_more(tiny_llama):
    made = plan(tiny_llama, memory=3 * MIB)
    more = int(made.limited_by.split("--memory ")[1].removesuffix("MiB"))
    assert plan(tiny_llama, memory=more * MIB).requests > made.requests
    pool = plan(tiny_llama, kv_cache_memory=MIB)
    more = int(pool.limited_by.split("--kv-cache-memory ")[1].removesuffix("MiB"))
    assert plan(tiny_llama, kv_cache_memory=more * MIB).requests > pool.requests
    seqs = plan(tiny_llama, kv_cache_memory=8 * MIB, max_num_seqs=2)
    assert seqs.requests == 2 and seqs.limited_by.startswith("--max-num-seqs 2; the KV pool holds ")


def refusal(*args: object, **fields: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        plan(*args, **fields)
    return caught.value


def test_too_little_memory_names_the_least_that_works(tiny_gemma3):
    error = refusal(tiny_gemma3, memory=1000, prompt=200)
    assert "1000 B are too little" in str(error) and "KV of one request of 220 tokens" in str(error)
    least = int(error.hint.removeprefix("give --memory ").removesuffix("MiB or more"))
    assert plan(tiny_gemma3, memory=least * MIB, prompt=200).requests >= 1
    refusal(tiny_gemma3, memory=(least - 1) * MIB, prompt=200)


def test_requests_that_do_not_fit_name_what_would_do(tiny_llama):
    over = refusal(tiny_llama, prompt=1024)
    assert str(over) == "requests of 1044 tokens do not fit into a context of 1024"
    assert over.hint == "take 20 tokens off --prompt-tokens or --output-tokens"
    short = refusal(tiny_llama, prompt=200, max_model_len=100)
    assert short.hint.endswith("or give --max-model-len 220")
    assert plan(tiny_llama, prompt=200, max_model_len=220).requests >= 1
    pool = refusal(tiny_llama, prompt=200, num_kv_blocks=5)
    assert "the KV pool holds 64" in str(pool) and pool.hint == "give --num-kv-blocks 15"
    assert plan(tiny_llama, prompt=200, num_kv_blocks=15).requests == 1


@pytest.mark.parametrize("fields", [{"prompt": 0}, {"output": -1}, {"memory": 0}, {"memory": -5}])
def test_sizes_start_at_one(fields):
    assert "must be at least 1" in str(refusal("m", **fields))


@pytest.mark.parametrize("other", ["kv_cache_memory", "num_kv_blocks"])
def test_two_sizes_of_one_pool_are_refused(other):
    flag = "--" + other.replace("_", "-")
    assert str(refusal("m", memory=MIB, **{other: 9})).startswith(f"memory and {flag} exclude each other")


def test_no_such_file():
    with pytest.raises(ModelFileError, match="no such file"):
        plan("nowhere.gguf")


def test_ceilings_only_with_figures_of_a_machine(tiny_llama):
    assert (plan(tiny_llama).decode, plan(tiny_llama).prefill) == ((), None)
    made = plan(tiny_llama, machine=Machine(bandwidth=1e9), kv_cache_memory=MIB)
    assert [(one.rows, one.context) for one in made.decode] == [(1, 70), (made.requests, 70)]
    assert made.prefill.tokens == 60


@pytest.mark.parametrize("family", FAMILIES)
def test_every_formula_holds_the_planned_numbers(tiny_paths, family):
    made = plan(tiny_paths[family], kv_cache_memory=2 * MIB, machine=Machine(bandwidth=1e9, ops=1e9))
    text = "\n".join(made.formulas)
    for one in made.encodings:
        assert f"{one.name} in the file: {one.values} values" in text and f"= {one.file_bytes} bytes" in text
    for index, pool in enumerate(made.kv):
        layers = f"2 x {pool.layers} layers x {pool.kv_heads} kv heads x {pool.key_size} x 2 bytes"
        assert f"kv group {index}, one token: {layers} = {pool.bytes_per_token} bytes" in text
        assert (
            f"x {BLOCK_SIZE} tokens x {pool.bytes_per_token} bytes = {pool.num_blocks * pool.block_bytes} bytes" in text
        )
    for size in (made.weight_bytes, made.activation_bytes, made.logit_bytes, made.rope_bytes):
        assert f"= {size} bytes" in text
    assert text.count("tokens/s") == len(made.decode) + 1


def test_the_engine_and_the_plan_ask_the_same_of_the_pool(tiny_llama, monkeypatch):
    """A field of KVRequest that only one of them sets would make them drift apart."""
    asked = []
    monkeypatch.setattr(build, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(build, "kv_request", lambda *args: asked.append(kv_request(*args)) or asked[-1])
    plan(tiny_llama)
    build_engine(EngineConfig(model=str(tiny_llama)))
    assert len(asked) == 2 and asked[0] == asked[1]
