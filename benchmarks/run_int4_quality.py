"""Measure what four-bit weights cost in perplexity, beside llama.cpp's own four-bit files of a model; appends rows.

    python -m venv build/peers/cyllama
    build/peers/cyllama/bin/pip install --no-deps cyllama==0.2.18 numpy
    python benchmarks/run_int4_quality.py build/smollm2-int4 --quantizer build/peers/cyllama/bin/python

All read the same held-out tokens. An artifact of ours runs in our INT8 runtime, with rounded activations. A file of
llama.cpp is read into floats and runs in floating point: that is the quality of its weights alone, and a little better
than llama.cpp's, which rounds activations in blocks of 32. `rise_…` is the rise of perplexity over the model that all
were made of, of prose and code together; `size_…` the bytes of the weights' file. `rise_…_weights` is that of
the artifact's weights alone, with activations in floating point.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from lib.models import CHECKPOINT, say
from lib.rows import RESULTS, Row, append, new_row
from torch import Tensor

from penjing.compress.decoder.stream import LayerStream
from penjing.compress.gguf.write import write_gguf
from penjing.compress.measure.perplexity import evaluation_windows, streamed_losses
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.imports.importer import import_model
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer

PEER = Path(__file__).parent / "peers" / "llama_cpp_quantize.py"
KINDS = ("Q4_0", "Q4_K_M")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="*", help="of ours, made of the checkpoint")
    parser.add_argument("--apart", type=Path, nargs="+", default=[], help="artifacts whose weights are judged alone")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="what all were made of")
    parser.add_argument("--quantizer", type=Path, help="a Python with cyllama; without it no rows of llama.cpp")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="of llama.cpp's files")
    parser.add_argument("--prose-tokens", type=int, default=8192)
    parser.add_argument("--code-tokens", type=int, default=4096)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_folder(arguments.checkpoint)
    windows = evaluation_windows(tokenizer, arguments.prose_tokens, arguments.code_tokens, 512)
    before = mean_loss(arguments.checkpoint, windows)
    rows: list[Row] = []

    def judge(name: str, folder: Path, num_bytes: int) -> None:
        rise = 100 * math.expm1(mean_loss(folder, windows) - before)
        say(f"{name}: {rise:+.2f} %, {num_bytes / 1e6:.1f} MB")
        rows.append(new_row("int4_quality", f"rise_{name}", rise, "%", runs=1))
        rows.append(new_row("int4_quality", f"size_{name}", num_bytes / 1e6, "MB", runs=1))

    for artifact in arguments.artifacts:
        judge(artifact.name, artifact, sum(path.stat().st_size for path in artifact.glob("*.safetensors")))
    for artifact in arguments.apart:
        rise = 100 * math.expm1(mean_loss(artifact, windows, weights_alone=True) - before)
        say(f"{artifact.name}, weights alone: {rise:+.2f} %")
        rows.append(new_row("int4_quality", f"rise_{artifact.name}_weights", rise, "%", runs=1))
    if arguments.quantizer is not None:
        with tempfile.TemporaryDirectory() as scratch:
            halves, folder = Path(scratch) / "f16.gguf", Path(scratch) / "imported"
            write_gguf(open_checkpoint(arguments.checkpoint), halves, Silent())
            for kind in arguments.kinds:
                command = [arguments.quantizer, PEER, halves, scratch, kind]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                made = Path(scratch) / f"{kind}.gguf"
                if done.returncode or not made.is_file():
                    raise SetupError(f"llama.cpp made no {kind}: {done.stderr[-500:]}")
                import_model(str(made), folder / kind, progress=Silent())
                judge(f"llama_cpp_{kind}", folder / kind, made.stat().st_size)
    append("int4_quality", rows, arguments.results)
    return 0


def mean_loss(folder: Path, windows: dict[str, Tensor], weights_alone: bool = False) -> float:
    """Nats a token over all windows of all texts."""
    losses = streamed_losses(LayerStream(open_checkpoint(folder)), windows, weights_alone=weights_alone)
    every = [loss for part in losses.values() for loss in part]
    return math.fsum(every) / len(every)


if __name__ == "__main__":
    sys.exit(guarded(main))
