"""Costs against numbers worked out by hand from the sizes of SmolLM2-135M-Instruct (Q4_1, embedding Q8_0)."""

from dataclasses import dataclass

import pytest

from yeoul.ops import vocabulary as v
from yeoul.ops.builder import Builder
from yeoul.ops.cost import Cost, StepShape, WeightSize, cost, program_cost, visible_keys
from yeoul.ops.passes import fuse
from yeoul.types import KVKind, KVSpec, RopeSpec

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 576, 1536, 9, 3, 64, 30, 49152


def q4_1(rows: int, columns: int) -> WeightSize:
    """20 bytes per 32 weights."""
    return WeightSize(rows, rows * columns // 32 * 20)


def smollm2() -> tuple[v.Program, dict[str, WeightSize]]:
    """The program and its weights' sizes, written down here independently of yeoul.models."""
    b = Builder()
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    rope = RopeSpec(HEAD, (1.0,) * (HEAD // 2), interleaved=True)
    x = b.embed("embd", HIDDEN)
    for _ in range(LAYERS):
        h = b.rms_norm(x, "norm", 1e-5)
        h = b.linear(h, "qkv", [v.Segment("q", q), v.Segment("k", kv), v.Segment("v", kv)])
        qs, ks, vs = b.split(h, [q, kv, kv])
        h = b.attention(b.rope(qs, rope), b.rope(ks, rope), vs, num_kv_heads=KV_HEADS, scale=0.125)
        x = b.add(x, b.linear(h, "o", [v.Segment("o", HIDDEN)]))
        h = b.rms_norm(x, "norm", 1e-5)
        h = b.linear(h, "gate_up", [v.Segment("gate", INNER), v.Segment("up", INNER)])
        x = b.add(x, b.linear(b.gated(h, v.Activation.SILU), "down", [v.Segment("down", HIDDEN)]))
    program = b.logits(b.rms_norm(b.gather_rows(x), "norm", 1e-5), "embd", VOCAB)
    sizes = {
        "embd": WeightSize(VOCAB, VOCAB * HIDDEN // 32 * 34),
        "norm": WeightSize(1, 4 * HIDDEN),
        "q": q4_1(q, HIDDEN),
        "k": q4_1(kv, HIDDEN),
        "v": q4_1(kv, HIDDEN),
        "o": q4_1(HIDDEN, q),
        "gate": q4_1(INNER, HIDDEN),
        "up": q4_1(INNER, HIDDEN),
        "down": q4_1(HIDDEN, INNER),
    }
    return program, sizes


def decode(context: int) -> StepShape:
    return StepShape(((context - 1, 1),), 1)


def test_decode_step_of_smollm2_by_hand():
    program, sizes = smollm2()
    total = program_cost(program, sizes, decode(1000))
    # Per layer 576x576 q, 2 x 192x576, 576x576 o, 3 x 1536x576: 3,538,944 weights. Output: 28,311,552.
    linear = 2 * (30 * 3_538_944 + 28_311_552)
    # 1000 keys, 9 heads, 64 dimensions for the scores and 64 for the values.
    attention = 30 * 2 * 1000 * 9 * 128
    # 61 norms at 4 per value, 60 additions, 30 gates at 5 per value, rotary at 3 per value of q and k.
    small = 61 * 4 * 576 + 60 * 576 + 30 * 5 * 1536 + 30 * 3 * (576 + 192)
    assert total.flops == linear + attention + small
    # Q4_1: 20 bytes per 32. Output matrix Q8_0: 34 per 32; one embedding row of 612 bytes; 61 norms of 2,304 bytes.
    assert total.weight_bytes == 30 * 2_211_840 + 30_081_024 + 612 + 61 * 2304 == 96_577_380
    # 2 x 3 heads x 64 x 2 bytes = 768 bytes per token and layer.
    assert total.kv_read_bytes == 30 * 1000 * 768 == 23_040_000
    assert total.kv_write_bytes == 30 * 768 == 23_040


def test_prefill_of_512_tokens_by_hand():
    program, sizes = smollm2()
    total = program_cost(program, sizes, StepShape(((0, 512),), 1))
    attention = [cost(op, sizes, StepShape(((0, 512),), 1)) for op in program.ops if isinstance(op, v.Attention)]
    # 1 + 2 + ... + 512 = 131,328 query-key pairs.
    assert sum(part.flops for part in attention) == 30 * 2 * 131_328 * 9 * 128
    assert total.kv_read_bytes == total.kv_write_bytes == 30 * 512 * 768
    # Weights are read once per step, but 512 embedding rows.
    assert total.weight_bytes == 96_577_380 + 511 * 612


def test_fuse_saves_activation_bytes_only():
    program, sizes = smollm2()
    shape = StepShape(((10, 4), (0, 7)), 2)
    plain, fused = program_cost(program, sizes, shape), program_cost(fuse(program), sizes, shape)
    assert fused.flops == plain.flops
    assert fused.weight_bytes == plain.weight_bytes
    # Gone, per layer: the gate-up result written and read, and each sum's operand written and read.
    assert plain.activation_bytes - fused.activation_bytes == 30 * 11 * 4 * 2 * (2 * INNER + 2 * HIDDEN)


def test_a_step_without_outputs_reads_no_output_matrix():
    program, sizes = smollm2()
    chunk = cost(program.ops[-1], sizes, StepShape(((0, 64),), 0))
    assert chunk == Cost()


def test_bias_counts_as_an_addition_and_as_bytes():
    b = Builder()
    b.linear(b.embed("embd", 8), "site", [v.Segment("w", 4, bias="b"), v.Segment("w", 4)])
    linear = b._ops[-1]
    sizes = {"w": WeightSize(4, 128), "b": WeightSize(1, 16)}
    got = cost(linear, sizes, StepShape(((0, 3),), 0))
    assert got == Cost(flops=3 * (2 * 8 * 8 + 4), weight_bytes=128 + 128 + 16, activation_bytes=3 * (8 + 8) * 4)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 100])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 12), (3, 4), (4, 1), (5, 3), (20, 7), (0, 0)])
def test_visible_keys_equals_counting(start: int, count: int, window: int):
    counted = sum(min(p + 1, window or p + 1) for p in range(start, start + count))
    assert visible_keys(start, count, window) == counted


@pytest.mark.parametrize(("start", "count", "read"), [(0, 4, 4), (3, 1, 4), (9, 1, 4), (9, 3, 6), (2, 5, 7)])
def test_window_attention_reads_the_keys_that_someone_sees(start: int, count: int, read: int):
    b = Builder()
    x = b.embed("embd", 8)
    b.attention(x, x, x, num_kv_heads=2, scale=1.0, window=4)
    got = cost(b._ops[-1], {}, StepShape(((start, count),), 0))
    assert got.kv_read_bytes == read * KVSpec(KVKind.WINDOW, 2, 4, 4, window=4).token_bytes() == read * 32


def kv_read(k_dtype: str, v_dtype: str) -> int:
    """Bytes read by a decode step over 100 keys of 2 heads of 64."""
    b = Builder(k_dtype, v_dtype)
    x = b.embed("embd", 128)
    b.attention(x, x, x, num_kv_heads=2, scale=1.0)
    return cost(b._ops[-1], {}, decode(100)).kv_read_bytes


def test_kv_traffic_follows_the_dtypes():
    f16 = kv_read("f16", "f16")
    assert f16 == 100 * 2 * 2 * 64 * 2
    assert kv_read("f32", "f32") == 2 * f16
    assert kv_read("bf16", "bf16") == f16
    assert kv_read("fp8_e4m3", "fp8_e4m3") == kv_read("fp8_e5m2", "fp8_e5m2") == f16 / 2
    assert kv_read("int8", "int8") == 100 * 2 * 2 * (64 + 2) and f16 / kv_read("int8", "int8") > 1.93
    assert kv_read("f16", "int8") == (f16 + kv_read("int8", "int8")) / 2
    with pytest.raises(ValueError, match="unknown KV dtype 'int3'"):
        kv_read("int3", "f16")


def test_every_op_of_the_vocabulary_has_a_cost():
    from yeoul.ops.cost import RULES

    assert set(RULES) == set(v.Op.__subclasses__()) - {Unknown}


@dataclass(frozen=True)
class Unknown(v.Op):
    pass


def test_an_op_without_a_cost_is_refused():
    with pytest.raises(ValueError, match="no cost is known for the op Unknown"):
        cost(Unknown(v.Value(0, v.Rows.T, 8)), {}, decode(1))


def test_costs_of_tiny_models_come_from_their_files(tiny_paths):
    from yeoul.models.registry import load_model
    from yeoul.ops.cost import weight_sizes
    from yeoul.weights.gguf import GGUFFile

    model = load_model(GGUFFile.open(tiny_paths["qwen2"]))
    shape = StepShape(((0, 1),), 1)
    total = program_cost(model.program, weight_sizes(model.weights), shape)
    files = sum(tensor.data.nbytes for name, tensor in model.weights.items() if name != "token_embd.weight")
    assert total.weight_bytes == files + 64 // 32 * 22
