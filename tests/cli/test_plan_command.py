"""yeoul plan: the screen and the JSON say the same; every refusal is one line with a number that works."""

import json
import re

import pytest
from cli_kit import cut, inline, refuses
from tiny import FAMILIES

from yeoul.kv.sizing import human

MACHINE = ["--bandwidth", 25, "--ops", 1.5]


def planned(*args: object) -> tuple[str, dict[str, object]]:
    done = inline("plan", *args, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    *screen, last = done.stdout.splitlines()
    return "\n".join(screen), json.loads(last)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_screen_and_the_json_say_the_same(tiny_paths, family):
    screen, made = planned(tiny_paths[family], "--memory", "8M", "--prompt-tokens", 100, *MACHINE)
    assert f"{family}, context of 1024 tokens" in screen and made["version"]
    for name in ("total_bytes", "activation_bytes", "rope_bytes", "logit_bytes"):
        assert human(made[name]) in screen
    for one in made["encodings"]:
        row = next(line for line in screen.splitlines() if f"weights, {one['name']} " in line)
        assert human(one["packed_bytes"]) in row and human(one["file_bytes"]) in row
    for pool in made["kv"]:
        kind = f"window of {pool['window']}" if pool["window"] else "full"
        assert re.search(rf"KV, {kind} .*{pool['num_blocks']} blocks", screen)
    assert f"requests of 228 tokens side by side: {made['requests']} (limit: {made['limited_by']})" in screen
    assert f"--kv-cache-memory {made['kv_cache_memory']} instead of --memory" in screen
    for one in (*made["decode"], made["prefill"]):
        assert f"{one['tokens_per_second']:.4g}" in screen
    assert made["decode"][0]["weight_bytes"] / made["decode"][0]["seconds"] <= 25e9


def test_without_figures_of_the_machine_there_are_no_ceilings(tiny_llama):
    screen, made = planned(tiny_llama)
    assert made["decode"] == [] and made["prefill"] is None
    assert "give --bandwidth GB/s and --ops TOP/s" in screen and "tokens/s" not in screen


def test_explain_shows_every_formula(tiny_llama):
    screen, made = planned(tiny_llama, "--explain", "--kv-cache-memory", "1M")
    assert [line[2:] for line in screen.splitlines() if line.startswith("- ")] == made["formulas"]
    assert "2 x 2 layers x 2 kv heads x 32 x 2 bytes = 512 bytes" in screen
    assert "- " not in planned(tiny_llama)[0]


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_screen(tiny_gemma3, columns, monkeypatch):
    monkeypatch.setattr("yeoul.cli.plan.WIDTH", columns)
    screen, _ = planned(tiny_gemma3, "--memory", "8M", *MACHINE)
    assert all(len(line) <= columns for line in screen.splitlines() if line[0] in "┏┃┡│├└")
    assert sum("KV, " in line for line in screen.splitlines()) == 2


def test_too_little_memory_names_the_least_that_works(tiny_llama):
    done = inline("plan", tiny_llama, "--memory", "10k")
    refuses(done, 1, "10.0 KiB are too little", hint="give --memory ")
    least = re.search(r"--memory (\w+)", done.stderr)[1]
    assert inline("plan", tiny_llama, "--memory", least).returncode == 0


def test_what_cannot_be_planned_is_one_line(tiny_llama, tmp_path):
    refuses(inline("plan", "nowhere.gguf"), 1, "no such file")
    refuses(inline("plan", cut(tiny_llama, tmp_path / "cut.gguf", 3000)), 1, "cut.gguf")
    refuses(inline("plan", tiny_llama, "--prompt-tokens", 5000), 1, "5128 tokens", hint="take 4104 tokens off")
    refuses(inline("plan", tiny_llama, "--num-kv-blocks", 9), 1, "the KV pool holds 128", hint="--num-kv-blocks 41")


def test_only_the_header_of_the_file_is_needed(tiny_llama, tmp_path):
    """The weights may be anything: a file of holes as long as the real one gives the same plan."""
    with_holes = tmp_path / "holes.gguf"
    data = tiny_llama.read_bytes()
    weights = sum(one["file_bytes"] for one in planned(tiny_llama)[1]["encodings"])
    with with_holes.open("wb") as out:
        out.write(data[:-weights])
        out.truncate(len(data))
    whole, holes = planned(tiny_llama, "--memory", "8M")[1], planned(with_holes, "--memory", "8M")[1]
    assert {**whole, "model": ""} == {**holes, "model": ""}
