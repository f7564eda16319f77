"""What each KV dtype costs: KL divergence, top-1 agreement and perplexity against a float32 cache.

usage: python bench/kv_quality.py [MODEL ...]        (default: smollm2-135m qwen2.5-coder-0.5b)

One native prefill of the first 300 tokens of tests/data/eval.txt per dtype; only the cache differs. Prints a table in
Markdown on stdout, one row per pair of dtypes. docs/reference/kv-dtypes.md holds a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from yeoul.engine.machine import available_cpus
from yeoul.errors import YeoulError
from yeoul.exec.native import NativeExecutor
from yeoul.exec.protocol import ExecutorLimits
from yeoul.models.registry import load_model
from yeoul.step import PlanRow, SlotState, StepPlan
from yeoul.text.tokenizer import load_tokenizer
from yeoul.weights.catalogue import find_model
from yeoul.weights.gguf import GGUFFile

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b")
PAIRS = (
    ("f32", "f32"),
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("int8", "int8"),
    ("f16", "int8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("f16", "fp8_e4m3"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("f16", "fp8_e5m2"),
)
TEXT = Path(__file__).parent.parent / "tests" / "data" / "eval.txt"
NUM_TOKENS = 300
BLOCK = 16


def main(names: list[str]) -> int:
    print("| model | keys | values | bytes per token | mean KL (nats) | same top token | perplexity |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    try:
        for name in names or MODELS:
            measure(name)
    except YeoulError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    return 0


def measure(name: str) -> None:
    """Print the rows of one model."""
    exact = None
    with GGUFFile.open(find_model(name)) as file:
        tokens = load_tokenizer(file.metadata).encode(TEXT.read_text(encoding="utf-8"))[:NUM_TOKENS]
        for k_dtype, v_dtype in PAIRS:
            size, scores = evaluate(file, k_dtype, v_dtype, tokens)
            exact = scores if exact is None else exact
            kl = (np.exp(exact) * (exact - scores)).sum(axis=1).mean()
            same = (exact.argmax(axis=1) == scores.argmax(axis=1)).mean()
            perplexity = np.exp(-scores[np.arange(len(tokens) - 1), tokens[1:]].mean())
            print(f"| {name} | {k_dtype} | {v_dtype} | {size} | {kl:.2e} | {same:.1%} | {perplexity:.2f} |", flush=True)


def evaluate(file: GGUFFile, k_dtype: str, v_dtype: str, tokens: list[int]) -> tuple[int, np.ndarray]:
    """Bytes of one token in all layers, and log-probabilities float64 [tokens, vocab]."""
    model = load_model(file, k_dtype=k_dtype, v_dtype=v_dtype)
    groups = model.program.kv_groups
    blocks = -(-len(tokens) // BLOCK)
    limits = ExecutorLimits(
        max_num_seqs=1,
        max_num_batched_tokens=len(tokens),
        max_model_len=len(tokens),
        num_blocks=(blocks + 1,) * len(groups),
        block_size=BLOCK,
    )
    executor = NativeExecutor(model, limits, num_threads=available_cpus())
    ids = (tuple(range(1, blocks + 1)),) * len(groups)
    state = SlotState(seed=1, sequence_index=0)
    plan = StepPlan(0, (PlanRow(0, 0, len(tokens), tuple(tokens), ids, False, state),))
    logits = executor.logits(plan).astype(np.float64)
    executor.close()
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return sum(spec.token_bytes() * len(layers) for spec, layers in groups), logits


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
