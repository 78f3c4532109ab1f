"""Measure what INT8 changes of a decoder's answers, in llama.cpp and in our engine, from llama.cpp's own FP32 answers.

    benchmarks/peers/llama_cpp.sh build/smollm2          # builds llama.cpp; its FP32 and Q8_0 files of the model
    python benchmarks/run_gguf.py build/smollm2-int8
    python benchmarks/run_gguf.py build/smollm2-int8 --engine build/smollm2-int8-hadamard

Our GGUF of the artifact and llama.cpp's own Q8_0 run in llama.cpp; the artifact, and further ones after --engine, in
our INT8 runtime. All read the same held-out tokens; the second half of each window counts. Rows in
benchmarks/results/gguf.jsonl: the divergence of the answers from FP32 (Kullback-Leibler, nats a token) and the rise of
perplexity.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from lib.models import ARTIFACT, say
from lib.rows import RESULTS, Row, append, new_row
from torch import Tensor

from penjing.compress.exports import export_artifact
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.progress import Silent
from penjing.core.text.corpus import code_text, heldout_text

PEER = Path("build/peers/llama_cpp")
TOOL, FP32, Q8_0 = PEER / "build/bin/llama-perplexity", PEER / "f32.gguf", PEER / "q8_0.gguf"
LLAMA_CPP = "llama.cpp 11434, its own Q8_0"
CHARACTERS = 8  # a token, at most, of what is given to llama.cpp
FOUND = re.compile(r"Mean\s+(KLD|PPL\(Q\)/PPL\(base\))\s*:\s*([-\d.]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, nargs="?", default=ARTIFACT)
    parser.add_argument("--engine", type=Path, nargs="*", default=[], help="further artifacts, in our runtime alone")
    parser.add_argument("--windows", type=int, default=16, help="of each text")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    for needed in (TOOL, FP32, Q8_0):
        if not needed.is_file():
            raise SetupError(f"{needed} is missing; benchmarks/peers/llama_cpp.sh CHECKPOINT makes it")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        ours = Path(scratch) / "ours.gguf"
        export_artifact(arguments.artifact, "gguf", ours, force=False, progress=Silent())
        sizes = {"baseline": LLAMA_CPP, "baseline_value": Q8_0.stat().st_size}
        rows.append(new_row("gguf", "ours/bytes", ours.stat().st_size, "bytes", runs=1, **sizes))
        letters = arguments.windows * arguments.window * CHARACTERS
        for text, source in (("prose", heldout_text()[:letters]), ("code", code_text(letters))):
            path, base = Path(scratch) / f"{text}.txt", Path(scratch) / f"{text}.logits"
            path.write_text(source, encoding="utf-8")
            common = ["-f", str(path), "-c", str(arguments.window), "--chunks", str(arguments.windows)]
            say(f"{text}: FP32 in llama.cpp")
            run_llama(FP32, [*common, "--save-all-logits", str(base)])
            compare = [*common, "--kl-divergence", "--kl-divergence-base", str(base)]
            found: dict[str, tuple[float, float]] = {}
            for name, file in (("llama_cpp", Q8_0), ("ours", ours)):
                say(f"{text}: {file.name} in llama.cpp")
                found[name] = parse_comparison(run_llama(file, compare))
            for artifact in (arguments.artifact, *arguments.engine):
                say(f"{text}: {artifact.name} in our runtime")
                found[f"engine_{artifact.name}"] = of_engine(artifact, base)
            rows += text_rows(text, found)
    append("gguf", rows, arguments.results)
    return 0


def run_llama(model: Path, options: list[str]) -> str:
    """What llama-perplexity says of a file.

    Raises:
        SetupError: it failed.
    """
    command = [str(TOOL), "-m", str(model), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"llama-perplexity failed on {model}: {done.stderr.strip()[-400:]}")
    return done.stdout + done.stderr


def parse_comparison(said: str) -> tuple[float, float]:
    """The divergence (nats a token) and the ratio of perplexities that `llama-perplexity --kl-divergence` says.

    Raises:
        SetupError: it says neither.
    """
    found = {key: float(value) for key, value in FOUND.findall(said)}
    if len(found) != 2:
        raise SetupError(f"llama-perplexity compared nothing: {said.strip()[-400:]}")
    return found["KLD"], found["PPL(Q)/PPL(base)"]


def read_logits(path: Path) -> tuple[Tensor, Tensor]:
    """What `llama-perplexity --save-all-logits` writes.

    Returns:
        log probabilities (windows, rows, vocabulary) float32 behind the tokens of each window's second half but the
        last, rounded to 16 bits above the largest − 16; and the tokens (windows, length) int64.
    """
    data = np.memmap(path, np.uint8, "r")
    assert bytes(data[:8]) == b"_logits_"
    length, vocabulary, windows = (int(size) for size in data[8:20].view(np.int32))
    ends = 20 + 4 * windows * length
    tokens = data[20:ends].view(np.int32).reshape(windows, length)
    width = 2 * ((vocabulary + 1) // 2) + 4
    rows = data[ends:].view(np.uint16).reshape(windows, length - 1 - length // 2, width)
    step, least = np.ascontiguousarray(rows[..., :4]).view(np.float32).transpose(2, 0, 1)[..., None]
    return torch.from_numpy(rows[..., 4 : 4 + vocabulary] * step + least), torch.from_numpy(tokens.astype(np.int64))


@torch.inference_mode()
def of_engine(artifact: Path, base: Path) -> tuple[float, float]:
    """The divergence and the ratio of perplexities of an artifact in our runtime, from the answers in `base`."""
    model = load_model(artifact).model
    expected_WRV, tokens_WT = read_logits(base)
    divergence, rise, first = [], [], tokens_WT.shape[1] // 2
    for expected_RV, tokens_T in zip(expected_WRV, tokens_WT, strict=True):
        rows = torch.arange(first, len(tokens_T) - 1)
        found_RV = model(tokens_T[None], logit_rows=rows).log_softmax(-1)
        apart_RV = expected_RV - found_RV
        # as llama.cpp sums: it keeps nothing less likely
        divergence.append((expected_RV.exp() * apart_RV).masked_fill_(expected_RV <= -16, 0).sum(-1))
        rise.append(apart_RV.gather(1, tokens_T[first + 1 :, None])[:, 0])
    return float(torch.cat(divergence).mean()), math.exp(float(torch.cat(rise).mean()))


def text_rows(text: str, found: dict[str, tuple[float, float]]) -> list[Row]:
    """Rows of one text; `ratio` of a divergence is to llama.cpp's own Q8_0."""
    rows = []
    for name, (divergence, ratio) in found.items():
        baseline = None if name == "llama_cpp" else LLAMA_CPP
        rows.append(
            new_row(
                "gguf", f"{text}/{name}/divergence", divergence, "nats",
                runs=1, baseline=baseline, baseline_value=None if baseline is None else found["llama_cpp"][0],
            )
        )  # fmt: skip
        rows.append(new_row("gguf", f"{text}/{name}/perplexity_rise", 100 * (ratio - 1), "%", runs=1))
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
