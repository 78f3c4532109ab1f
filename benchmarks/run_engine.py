"""Measure penjing's engine against its peers: interleaved rounds, a process for each run, medians; appends rows.

    python benchmarks/run_engine.py                     # against transformers FP32 eager
    python benchmarks/run_engine.py --peers all         # and llama_cpp, openvino, ort_genai, vllm (made on first use)
    python benchmarks/run_engine.py --through-server    # also through Triton server, in the same rounds
    python benchmarks/run_engine.py build/smollm2-int4 --peers all      # 4 bits beside 4 bits, and beside 8
    python benchmarks/run_engine.py --kv-dtype int8 --peers all         # with our keys and values in INT8
    python benchmarks/run_engine.py build/gemma3-int4 --checkpoint build/gemma3 --peers all     # another model

The figures are defined in peers/figures.py; every contestant gets the same prompts, threads and rounds. Rows of an
artifact in 4 bits are called int4/…, with keys and values in INT8 int8_cache/…, with AMX amx/…, without AVX-512
avx2/…; those of another model than SmolLM2 begin with the name of its checkpoint's folder. Where no other program reads
that checkpoint, peers run the GGUF file that it was imported from, and our own artifact in 8 bits is build/NAME-int8.
The README tells of the last rows of each name; with `--machine NAME` rows have that name in front of the figure's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lib.contestants import (
    METRICS,
    OWN_INT8,
    Contestant,
    Outcome,
    choose,
    four_bit_peers,
    gguf_peers,
    peers,
    penjing,
    penjing_server,
    prepare,
    run_rounds,
)
from lib.level import level_prefix
from lib.models import (
    ARTIFACT,
    CHECKPOINT,
    add_arguments,
    gguf_of,
    make_models,
    make_prompts,
    say,
    warn_if_busy,
)
from lib.rows import RESULTS, Row, append, new_row
from run_server import server_rows

from penjing.compress.decoder.check import linear_modules
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.runtime.schemes import quantized_modules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--peers", default="transformers", help="names joined by commas, all, or none")
    parser.add_argument("--through-server", action="store_true", help="also measure through Triton server")
    kinds = ("auto", "float16", "bfloat16", "int8")
    parser.add_argument("--kv-dtype", default="auto", choices=kinds, help="of our keys and values")
    parser.add_argument("--machine", default="", metavar="NAME", help="names rows that the README does not tell of")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()

    checkpoint, artifact = make_models(arguments.checkpoint, arguments.model)
    four = has_four_bits(artifact)
    gguf = None if arguments.peers == "none" else gguf_of(checkpoint)
    if gguf is not None:
        known = gguf_peers(checkpoint.name, checkpoint.with_name(f"{checkpoint.name}-int8"))
    else:
        known = four_bit_peers(ARTIFACT) if four else peers(checkpoint)
    contestants: list[Contestant] = [penjing(artifact, arguments.kv_dtype)]
    unmade: dict[str, str] = {}
    for name in choose(arguments.peers, list(known)):
        try:
            say(f"{name}: environment and model files")
            prepare(known[name], gguf or checkpoint)
            contestants.append(known[name])
        except SetupError as error:
            unmade[name] = str(error)
            say(f"{name} is left out: {error}")
    if arguments.through_server:
        contestants.append(penjing_server(artifact))

    warn_if_busy()
    outcome = run_rounds(
        contestants,
        make_prompts(artifact),
        rounds=arguments.rounds,
        runs=arguments.runs,
        threads=arguments.threads,
        say=say,
    )
    outcome.missing |= unmade
    runs = arguments.rounds * arguments.runs
    prefix = ("" if checkpoint == CHECKPOINT else f"{checkpoint.name}/") + ("int4/" if four else "")
    prefix += "" if arguments.kv_dtype == "auto" else f"{arguments.kv_dtype}_cache/"
    prefix += level_prefix() + (f"{arguments.machine}/" if arguments.machine else "")
    append("engine", engine_rows(outcome, runs, prefix), arguments.results)
    if arguments.through_server:
        append("server", server_rows(outcome, runs, prefix), arguments.results)
    return 0


def has_four_bits(artifact: Path) -> bool:
    """Whether any layer of it has."""
    checkpoint = open_checkpoint(artifact)
    quantization = checkpoint.quantization
    return quantization is not None and any(
        each.bits == 4 for each in quantized_modules(quantization, linear_modules(checkpoint.config)).values()
    )


def engine_rows(outcome: Outcome, runs: int, prefix: str = "") -> list[Row]:
    """A row for each figure and peer: our value, and its ratio to the peer's. A failed peer has a row that says so.

    Metrics begin with `prefix`.

    Raises:
        SetupError: our own engine failed.
    """
    if "penjing" in outcome.missing:
        raise SetupError(outcome.missing["penjing"])
    ours = {metric: outcome.median("penjing", metric) for metric in METRICS}
    rivals = [name for name in outcome.results if not name.startswith("penjing") or name == OWN_INT8]
    rows = [
        new_row(
            "engine",
            f"{prefix}{metric}",
            ours[metric],
            "tok/s",
            runs=runs,
            baseline=outcome.label(name),
            baseline_value=outcome.median(name, metric),
        )
        for name in rivals
        for metric in METRICS
    ]
    if not rivals:
        rows = [new_row("engine", f"{prefix}{metric}", ours[metric], "tok/s", runs=runs) for metric in METRICS]
    for name, reason in outcome.missing.items():
        if not name.startswith("penjing") or name == OWN_INT8:
            line = reason.splitlines()[0]
            rows.append(new_row("engine", f"{prefix}all", None, "tok/s", runs=0, baseline=name, reason=line))
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
