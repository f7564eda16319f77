"""bench/peers.py: what is compared with what, and what is said of engines that are not there."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "bench" / "peers.py"


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["peers"]


def scripted(peers, name, values, order, absent=None):
    samples = iter(values)

    def sample():
        order.append(name)
        return {"prompt 8": next(samples)}

    return peers.Engine(name, [name], sample, absent)


def test_samples_are_interleaved_and_ratios_are_taken_round_by_round(peers, capsys):
    order = []
    a = scripted(peers, "a", [1.0, 20.0, 30.0, 10.0], order)
    b = scripted(peers, "b", [9.0, 10.0, 10.0, 2.0], order)
    gone = scripted(peers, "c", [], order, "c is not there")
    result = peers.run_present([a, b, gone], 3)
    assert order == ["a", "b"] * 4
    entry = result["figures"]["prompt 8"]
    assert entry["engines"]["a"] == {"median": 20.0, "low": 10.0, "high": 30.0}
    assert entry["ratios"] == {"b": {"median": 3.0, "low": 2.0, "high": 5.0}}
    assert result["absent"] == {"c": "c is not there"} and "c: not compared: c is not there" in capsys.readouterr().err
    assert "| prompt 8 | b | 10 (2-10) | 3 (2-5) |" in list(peers.table("x", "a", result["figures"]))


def test_the_tools_reports_are_read(peers):
    report = {
        "prompt": {"tokens": 5, "tokens_per_second": {"median": 7.0}},
        "decode": [{"batch": 2, "tokens_per_second": {"median": 9.0}}],
    }
    assert peers.yeoul_figures(report) == {"prompt 5": 7.0, "decode 2": 9.0}
    lines = "log\n" + json.dumps({"pl": 2, "speed_tg": 3.5, "pp": 16}) + "\n"
    assert peers.llama_figures([{"n_prompt": 5, "avg_ts": 4}], lines) == {"prompt 5": 4.0, "decode 2": 3.5}


def test_peers_that_are_not_installed_are_absent(peers, tmp_path):
    options = peers.parse(["m.gguf", "--llama", str(tmp_path), "--vllm", str(tmp_path / "python"), "--users", "1"])
    work = peers.work_of(options)
    assert [engine.absent for engine in peers.offline_engines(options, work)] == [None, "llama-bench is not there"]
    absent = [engine.absent for engine, _ in peers.server_engines(options, work)]
    assert absent == [None, "llama-server is not there", "python is not there"]


def test_further_configurations_of_yeoul(peers, capsys):
    options = peers.parse(["m.gguf", "--yeoul", "avx2=--isa avx2"])
    engines = peers.offline_engines(options, peers.work_of(options))
    assert [engine.name for engine in engines] == ["yeoul", "yeoul avx2"]
    assert "avx2" in engines[1].command and "avx2" not in engines[0].command
    with pytest.raises(SystemExit):
        peers.parse(["m.gguf", "--yeoul", "avx2"])
    assert "is no NAME=FLAGS" in capsys.readouterr().err
