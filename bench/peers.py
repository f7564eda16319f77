"""The same work on Yeoul and on whichever peers are there, interleaved A B A B in one run. See bench/README.md.

Every engine is a command: one that measures and ends, or a server that `yeoul bench serve` loads. The figures are
tokens per second (and, of servers, TTFT); each engine has its own tool's word for the offline ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, float]
YEOUL = [sys.executable, "-c", "import sys; from yeoul.cli import main; sys.exit(main())"]
START_TIMEOUT = 600.0
"""Seconds until a server must answer."""


@dataclass(frozen=True)
class Work:
    """What every engine does in one sample. Lengths in tokens."""

    prompt: int
    context: int
    decode: int
    rows: tuple[int, ...]
    users: tuple[int, ...]
    requests_per_user: int
    http_input: int
    http_output: int


@dataclass
class Engine:
    """One configuration of one engine. `sample` does the work once; `absent` says why it cannot."""

    name: str
    command: list[str]
    sample: Callable[[], Figures]
    absent: str | None = None
    samples: list[Figures] = field(default_factory=list)


def last_json(text: str) -> Any:
    """The object on the last line."""
    return json.loads(text.strip().splitlines()[-1])


def output_of(command: Sequence[str]) -> str:
    """Stdout of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SystemExit(f"error: {' '.join(command[:4])} ... failed with {done.returncode}: {tail[0]}")
    return done.stdout


# Offline.


def yeoul_engine(name: str, model: str, flags: list[str], work: Work, threads: int) -> Engine:
    command = [*YEOUL, "bench", "latency", model, "--repeats", "1", "--num-threads", str(threads), "--json", *flags]
    command += ["--prompt-tokens", str(work.prompt), "--context-tokens", str(work.context)]
    command += ["--decode-tokens", str(work.decode), "--batch", ",".join(map(str, work.rows))]
    return Engine(name, command, lambda: yeoul_figures(last_json(output_of(command))))


def yeoul_figures(report: Any) -> Figures:
    """Of `yeoul bench latency --json`."""
    figures = {f"prompt {report['prompt']['tokens']}": report["prompt"]["tokens_per_second"]["median"]}
    for row in report["decode"]:
        figures[f"decode {row['batch']}"] = row["tokens_per_second"]["median"]
    return figures


def llama_engine(folder: Path, model: str, work: Work, threads: int) -> Engine:
    common = ["-m", model, "-t", str(threads)]
    prompt = [str(folder / "llama-bench"), *common, "-p", str(work.prompt), "-n", "0", "-r", "1", "-o", "json"]
    rows = ",".join(map(str, work.rows))
    size = max(work.rows) * (work.context + work.decode)
    decode = [str(folder / "llama-batched-bench"), *common, "-c", str(size), "-npp", str(work.context)]
    decode += ["-ntg", str(work.decode), "-npl", rows, "--output-format", "jsonl"]
    return Engine(
        "llama.cpp",
        [*prompt, "&&", *decode],
        lambda: llama_figures(json.loads(output_of(prompt)), output_of(decode)),
        missing(folder / "llama-bench") or missing(folder / "llama-batched-bench"),
    )


def llama_figures(bench: Any, batched: str) -> Figures:
    """Of `llama-bench -o json` and `llama-batched-bench --output-format jsonl`, which mixes lines of log in."""
    figures = {f"prompt {run['n_prompt']}": float(run["avg_ts"]) for run in bench}
    rows = [json.loads(line) for line in batched.splitlines() if line.startswith("{")]
    return figures | {f"decode {row['pl']}": float(row["speed_tg"]) for row in rows}


def missing(path: Path) -> str | None:
    return None if path.is_file() else f"{path.name} is not there"


# Servers.


def server_engine(name: str, command: list[str], model: str, port: int, work: Work, absent: str | None) -> Engine:
    return Engine(name, command, lambda: http_figures(port, model, work), absent)


def http_figures(port: int, model: str, work: Work) -> Figures:
    figures: Figures = {}
    for users in work.users:
        command = [*YEOUL, "bench", "serve", "--base-url", f"http://127.0.0.1:{port}/v1", "--model", model, "--json"]
        command += ["--users", str(users), "--requests", str(users * work.requests_per_user)]
        command += ["--input-tokens", str(work.http_input), "--output-tokens", str(work.http_output)]
        summary = last_json(output_of(command))["summary"]
        if summary["failed"]:
            raise SystemExit(f"error: {summary['failed']} requests failed: {summary['errors']}")
        figures[f"http {users}"] = summary["output_tokens_per_second"]
        figures[f"http {users} TTFT p50, s"] = summary["ttft"]["p50"]
    return figures


@contextmanager
def running(engine: Engine, port: int) -> Iterator[None]:
    """The engine's server, from its first answer on; ended by a signal."""
    process = subprocess.Popen(engine.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(process, engine.name, port)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes], name: str, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"error: the server of {name} did not start")


# Comparing.


def interleave(engines: Sequence[Engine], repeats: int, say: Callable[[str], None]) -> None:
    """A B A B: a warm-up of each that is thrown away, then one sample of each in turn."""
    for round_number in range(repeats + 1):
        for engine in engines:
            figures = engine.sample()
            if round_number:
                engine.samples.append(figures)
            say(f"round {round_number} of {repeats}: {engine.name}")


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def compare(engines: Sequence[Engine]) -> dict[str, Any]:
    """Per figure: each engine's spread, and the first engine's ratio to each other one, round by round."""
    first, result = engines[0], {}
    for figure in first.samples[0]:
        own = [sample[figure] for sample in first.samples]
        entry: dict[str, Any] = {"engines": {}, "ratios": {}}
        for engine in engines:
            values = [sample[figure] for sample in engine.samples if figure in sample]
            if len(values) < len(own):
                continue
            entry["engines"][engine.name] = spread(values)
            if engine is not first:
                entry["ratios"][engine.name] = spread([a / b for a, b in zip(own, values, strict=True)])
        result[figure] = entry
    return result


def table(title: str, first: str, figures: dict[str, Any]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield f"| {title} | engine | median (low-high) | {first} / engine |"
    yield "| --- | --- | --- | --- |"
    for figure, entry in figures.items():
        for name, values in entry["engines"].items():
            ratio = shown(entry["ratios"][name]) if name in entry["ratios"] else ""
            yield f"| {figure} | {name} | {shown(values)} | {ratio} |"


def shown(values: dict[str, float]) -> str:
    return "{median:.4g} ({low:.4g}-{high:.4g})".format(**values)


# The command line.


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument(
        "--yeoul", action="append", default=[], metavar="NAME=FLAGS", help="a further Yeoul, e.g. avx2=--isa avx2"
    )
    parser.add_argument(
        "--llama", type=Path, metavar="DIR", help="where llama-bench, llama-batched-bench, llama-server are"
    )
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="the interpreter of vLLM's environment")
    parser.add_argument("--vllm-model", metavar="DIR", help="the model as vLLM reads it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--context-tokens", type=int, default=16)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32), help="decoded together, offline")
    parser.add_argument("--users", type=numbers, default=(), help="of the HTTP servers, e.g. 1,8,32; none: no servers")
    parser.add_argument("--requests-per-user", type=int, default=2)
    parser.add_argument("--http-input", type=int, default=120)
    parser.add_argument("--http-output", type=int, default=128)
    parser.add_argument("--port", type=int, default=18000, help="the servers' first port")
    parser.add_argument("--output", type=Path, help="file for the JSON")
    parsed = parser.parse_args(args)
    if parsed.repeats < 1:
        parser.error("--repeats must be at least 1")
    for text in parsed.yeoul:
        if not re.fullmatch(r"[\w.-]+=.+", text):
            parser.error(f"--yeoul {text!r} is no NAME=FLAGS")
    return parsed


def work_of(options: argparse.Namespace) -> Work:
    return Work(
        prompt=options.prompt_tokens,
        context=options.context_tokens,
        decode=options.decode_tokens,
        rows=options.rows,
        users=options.users,
        requests_per_user=options.requests_per_user,
        http_input=options.http_input,
        http_output=options.http_output,
    )


def yeouls(options: argparse.Namespace) -> dict[str, list[str]]:
    further = dict(text.split("=", 1) for text in options.yeoul)
    return {"yeoul": []} | {f"yeoul {name}": flags.split() for name, flags in further.items()}


def offline_engines(options: argparse.Namespace, work: Work) -> list[Engine]:
    engines = [
        yeoul_engine(name, options.model, flags, work, options.threads) for name, flags in yeouls(options).items()
    ]
    if options.llama:
        engines.append(llama_engine(options.llama, options.model, work, options.threads))
    return engines


def server_engines(options: argparse.Namespace, work: Work) -> list[tuple[Engine, int]]:
    """Each with its port."""
    ports = iter(range(options.port, options.port + 100))
    threads, engines = str(options.threads), []
    for name, flags in yeouls(options).items():
        port = next(ports)
        command = [
            *YEOUL,
            "serve",
            options.model,
            "--served-model-name",
            "m",
            "--port",
            str(port),
            "--num-threads",
            threads,
        ]
        engines.append((server_engine(name, command + flags, "m", port, work, None), port))
    if options.llama:
        port, binary = next(ports), options.llama / "llama-server"
        slots = max(work.users)
        size = slots * (2 * (work.http_input + work.http_output) + 64)
        command = [
            str(binary),
            "-m",
            options.model,
            "-t",
            threads,
            "--port",
            str(port),
            "-np",
            str(slots),
            "-c",
            str(size),
        ]
        engines.append((server_engine("llama.cpp", command, "m", port, work, missing(binary)), port))
    if options.vllm:
        port = next(ports)
        command = [str(options.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.vllm_model)]
        command += ["--served-model-name", "m", "--port", str(port)]
        absent = missing(options.vllm) or (None if options.vllm_model else "--vllm-model is not given")
        engines.append((server_engine("vLLM", command, "m", port, work, absent), port))
    return engines


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_present(engines: Sequence[Engine], repeats: int) -> dict[str, Any]:
    present = [engine for engine in engines if engine.absent is None]
    for engine in engines:
        if engine.absent is not None:
            say(f"{engine.name}: not compared: {engine.absent}")
    interleave(present, repeats, say)
    return {
        "commands": {engine.name: engine.command for engine in present},
        "absent": {engine.name: engine.absent for engine in engines if engine.absent is not None},
        "figures": compare(present),
    }


def main(args: Sequence[str] | None = None) -> int:
    """Compare; tables go to stdout, one JSON object is its last line."""
    options = parse(args)
    work = work_of(options)
    report: dict[str, Any] = {
        "benchmark": "peers",
        "unix": time.time(),
        "work": work.__dict__,
        "repeats": options.repeats,
    }
    report |= {"threads": options.threads, "cpu": cpu_name(), "commit": commit()}
    report["offline"] = run_present(offline_engines(options, work), options.repeats)
    if work.users:
        servers = server_engines(options, work)
        with ExitStack() as stack:
            for engine, port in servers:
                if engine.absent is None:
                    stack.enter_context(running(engine, port))
            report["http"] = run_present([engine for engine, _ in servers], options.repeats)
    for part in ("offline", "http"):
        if part in report:
            print(*table(f"{part}, tokens/s", "yeoul", report[part]["figures"]), sep="\n", end="\n\n")
    text = json.dumps(report)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    return 0


def cpu_name() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else "unknown"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
