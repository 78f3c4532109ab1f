"""Measure what an adapter of a checkpoint does beside its INT8 artifact, in the serving engine; appends rows.

    python benchmarks/run_adapter_quality.py                     # trains the adapter and compresses where none is there

The adapter is what `recipes/smollm2-lora.toml` teaches in `--steps` updates: sums as conversations. Contestants are the
checkpoint and its artifact, each with the adapter (`…_adapter`) and without, and `int8_merged`, an artifact that the
same recipe made of the checkpoint that training exports with the adapter merged into it. `sums` are the answers of
conversations like those of the recipe about numbers that it never had, `prose` is held-out text. Rows are the
perplexity of each (baseline: the checkpoint with the adapter; without one for the two that have none), the share of
places where the most likely token is the checkpoint's with the adapter, and the mean distance of log probabilities to
it. Only quality is measured, so other programs do not disturb it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

from lib.models import ROOT, make_models, say
from lib.rows import RESULTS, Row, append, new_row

from penjing.compress.run import run_recipe
from penjing.core.cli import guarded
from penjing.core.config import inline_toml
from penjing.core.progress import progress_bar
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.corpus import heldout_tokens
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.run import train

NAME, REFERENCE = "adapter_quality", "fp32_adapter"
NUMBERS = (43, 47, 48, 51, 52, 54, 57, 59)  # the recipe's are at most 40
WINDOW, WINDOWS = 256, 8
Place = tuple[float, int]  # the log probability of a text's token, and the most likely token there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build/smollm2")
    parser.add_argument(
        "--artifact", type=Path, default=ROOT / "build/smollm2-int8", help="of recipes/smollm2-int8.toml"
    )
    parser.add_argument(
        "--trained", type=Path, default=ROOT / "build/smollm2-lora", help="of recipes/smollm2-lora.toml"
    )
    parser.add_argument("--merged", type=Path, default=ROOT / "build/smollm2-lora-int8", help="made of --trained")
    parser.add_argument("--steps", type=int, default=8, help="updates where the adapter is not there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    checkpoint, artifact = make_models(arguments.checkpoint, arguments.artifact)
    make_others(arguments, checkpoint)
    tokenizer = Tokenizer.from_folder(checkpoint)
    texts = {"sums": sums(checkpoint, tokenizer), "prose": prose(tokenizer)}
    adapter = {"it": arguments.trained / "adapter"}
    found: dict[str, dict[str, list[Place]]] = {}
    contestants = (("fp32", checkpoint, adapter), ("int8", artifact, adapter), ("int8_merged", arguments.merged, {}))
    for name, folder, given in contestants:
        engine = load_engine(folder, EngineConfig(adapters=given, enable_prefix_caching=False))
        found[name] = {text: places(engine, asked, None) for text, asked in texts.items()}
        if given:
            found[f"{name}_adapter"] = {text: places(engine, asked, "it") for text, asked in texts.items()}
        say(f"{name} done")
    append(NAME, [row for text in texts for name in found for row in rows_of(found, name, text)], arguments.results)
    return 0


def make_others(arguments: argparse.Namespace, checkpoint: Path) -> None:
    """The trained adapter, and the artifact of the merged checkpoint, where they are missing."""
    with progress_bar() as progress:
        if not arguments.trained.exists():
            told = [f"initial={inline_toml(str(checkpoint))}", f"output={inline_toml(str(arguments.trained))}"]
            train(ROOT / "recipes/smollm2-lora.toml", [*told, f"steps={arguments.steps}", "data.batch_size=4"])
        if not arguments.merged.exists():
            told = [
                f"model={inline_toml(str(arguments.trained))}",
                "evaluate.prose_tokens=512",
                "evaluate.code_tokens=512",
            ]
            run_recipe(
                ROOT / "recipes/smollm2-int8.toml", [*told, "guard.perplexity_ratio=1.2"], out=arguments.merged,
                progress=progress,
            )  # fmt: skip


def sums(folder: Path, tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Conversations as tokens, and where the answer begins."""
    template = ChatTemplate.from_folder(folder)
    assert template is not None
    found = []
    for a, b in product(NUMBERS, NUMBERS):
        asked = template.render([{"role": "user", "content": f"What is {a} + {b}?"}])
        begin = len(tokenizer.encode(asked, allow_special=True, add_special=False))
        whole = tokenizer.encode(f"{asked}{a} + {b} = {a + b}", allow_special=True, add_special=False)
        found.append((whole, begin))
    return found


def prose(tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """Windows of held-out text; the first token of each is context only."""
    return [(window, 1) for window in heldout_tokens(tokenizer, WINDOW * WINDOWS).view(-1, WINDOW).tolist()]


def places(engine: LLMEngine, texts: list[tuple[list[int], int]], adapter: str | None) -> list[Place]:
    """Of each token of each text from its place on."""
    found: list[Place] = []
    for number, (tokens, begin) in enumerate(texts):
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, lora_name=adapter)
        engine.add(Request(f"{number}", tokens, params))
        while engine.has_work():
            for output in engine.step():
                for place, scores in enumerate(output.prompt_logprobs or ()):
                    if place >= begin and scores is not None:
                        best = max(scores, key=lambda token, of=scores: of[token].logprob)
                        found.append((scores[tokens[place]].logprob, best))
    return found


def rows_of(found: Mapping[str, Mapping[str, list[Place]]], name: str, text: str) -> list[Row]:
    """The rows of a contestant on a text."""
    mine, baseline = found[name][text], "fp32" if name == "int8" else REFERENCE
    reference, said = found[baseline][text], "FP32 with the adapter" if baseline == REFERENCE else "FP32"

    def row(metric: str, value: float, unit: str, beside: float | None = None) -> Row:
        return new_row(NAME, f"{text}/{name}/{metric}", value, unit, runs=1, baseline=said, baseline_value=beside)

    rows = [row("perplexity", perplexity(mine), "perplexity", perplexity(reference) if name != baseline else None)]
    if name in ("fp32", REFERENCE):
        return rows
    pairs = list(zip(mine, reference, strict=True))
    same = sum(one[1] == other[1] for one, other in pairs) / len(pairs)
    apart = math.fsum(abs(one[0] - other[0]) for one, other in pairs) / len(pairs)
    return [*rows, row("same_token", 100 * same, "%"), row("logprob_distance", apart, "nats")]


def perplexity(scores: list[Place]) -> float:
    """Of what was scored."""
    return math.exp(-math.fsum(logprob for logprob, _ in scores) / len(scores))


if __name__ == "__main__":
    sys.exit(guarded(main))
