"""What INT8 costs a pruned classifier, calibrated or trained, as rows in benchmarks/results/int8_quality.jsonl.

    python benchmarks/run_int8_quality.py --list                             # the pieces, and how long each takes
    python benchmarks/run_int8_quality.py --seeds 1 2 3                      # everything
    python benchmarks/run_int8_quality.py --seeds 1 --pieces ptq qat --steps 300
    python benchmarks/run_int8_quality.py --quick                            # under a minute; shows rows, writes none

The networks are those of run_prune_quality.py and lie in the same folder: `dense-SEED`, and `l1-SEED`, which is pruned
and taught again. They are taken as they are, whatever made them; what is missing is made as the recipes say. Each piece
is quantized from `l1-SEED` as the last step of recipes/resnet-fashion-int8.toml says: `ptq` calibrates only,
`ptq_equalized` equalises channels first and corrects biases, `qat` is the step itself, taught by `dense-SEED`. A piece
that is complete is not made again, one that was killed goes on. Accuracy is that of ONNX Runtime's integer kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from lib.rows import Row, append, new_row, show
from run_prune_quality import Studies, study_parser

from penjing.compress.measure.cost import weight_bytes
from penjing.compress.report.schema import Report
from penjing.core.cli import guarded
from penjing.core.errors import ConfigError
from penjing.core.manifest import MANIFEST_NAME
from penjing.core.progress import progress_bar

BENCHMARK = "int8_quality"
# Minutes of a piece (of one seed) on two quiet AVX2 cores.
PIECES = {"ptq": 1, "ptq_equalized": 1, "qat": 6}


def main() -> int:
    arguments = study_parser(__doc__).parse_args()
    if arguments.list:
        print("fashion: " + ", ".join(f"{piece} {minutes} min" for piece, minutes in PIECES.items()))
        return 0
    pieces = arguments.pieces or list(PIECES)
    if unknown := sorted(set(pieces) - PIECES.keys()):
        raise ConfigError(f"--pieces {unknown[0]}: there is no such piece; take {', '.join(PIECES)}")
    with progress_bar() as progress:
        study = Int8Study(arguments, Studies(argparse.Namespace(**vars(arguments) | {"steps": None}), progress))
        seeds = arguments.seeds[: 1 if arguments.quick else None]
        reports = {piece: [study.report(piece, seed) for seed in seeds] for piece in PIECES if piece in pieces}
        dense = [weight_bytes(study.networks.dense(seed)) for seed in seeds]
    rows = quality_rows(study.networks.name, reports, dense)
    if arguments.quick:
        show(rows)
    else:
        append(BENCHMARK, rows, arguments.results)
    return 0


class Int8Study:
    """The pieces, each a folder beside the networks that it is made of.

    Args:
        networks: where the dense and the pruned networks come from.
    """

    def __init__(self, arguments: argparse.Namespace, networks: Studies) -> None:
        self.arguments, self.networks = arguments, networks

    def report(self, piece: str, seed: int) -> Report:
        """Two stages: the pruned network, and what `piece` makes of it."""
        steps = self.arguments.steps if piece == "qat" else None
        name = f"{piece}-{steps}-steps-{seed}" if steps else f"{piece}-{seed}"
        values = self.networks.recipe("resnet-fashion-int8", self._pruned(seed), name)
        quantize = values["steps"][-1]
        quantize |= {"teacher": str(self.networks.dense(seed)), "seed": seed}
        if self.arguments.quick:
            quantize |= {"steps": 2, "batch_size": 64, "parity_bound": 1.0}  # its logits hardly vary between images
            values |= {"evaluate": {"images": 200}, "data": {"images": 64}}
        if steps:
            quantize["steps"] = steps
        if piece != "qat":
            quantize["steps"] = 0
            del quantize["teacher"]
        if piece == "ptq_equalized":
            quantize |= {"equalize": True, "correct_bias": True}
        values |= {"steps": [quantize], "measure": {"rounds": 1, "seconds": 0.0}}  # run_int8.py measures speed
        return self.networks.run(values)

    def _pruned(self, seed: int) -> Path:
        folder = self.networks.work / f"l1-{seed}"
        if not (folder / MANIFEST_NAME).exists():
            self.networks.classifier("l1", seed)
        return folder


def quality_rows(study: str, reports: dict[str, list[Report]], dense_bytes: Sequence[int]) -> list[Row]:
    """Mean and standard deviation over seeds of each piece; what training gains over each calibration; bytes.

    Args:
        reports: piece → a report a seed, see `Int8Study.report`.
        dense_bytes: of the weights of each seed's FP32 network before it was pruned.
    """
    rows: list[Row] = []
    for piece, found in reports.items():
        name, runs = f"{study}_{piece}", len(found)
        before, after = ([100 * report.stages[place].quality.value for report in found] for place in (0, -1))
        pruned = {"baseline": f"pruned FP32, mean of {runs} seeds", "baseline_value": statistics.mean(before)}
        if not rows:
            rows += _spread(f"{study}_pruned_accuracy", before, "%")
        rows.append(new_row(BENCHMARK, f"{name}_accuracy", statistics.mean(after), "%", runs=runs, **pruned))
        rows += _spread(f"{name}_points_lost", [old - new for old, new in zip(before, after, strict=True)])
        if "qat" in reports and piece != "qat":
            trained = [100 * report.stages[-1].quality.value for report in reports["qat"]]
            rows += _spread(f"{study}_qat_points_over_{piece}", [q - p for q, p in zip(trained, after, strict=True)])
        sizes = [report.stages[-1].size.bytes for report in found]
        dense = {"baseline": "FP32 checkpoint, not pruned", "baseline_value": statistics.mean(dense_bytes)}
        rows.append(new_row(BENCHMARK, f"{name}_bytes", statistics.mean(sizes), "B", runs=runs, **dense))
        smaller = statistics.mean(dense_bytes) / statistics.mean(sizes)
        rows.append(new_row(BENCHMARK, f"{name}_times_smaller", smaller, "×", runs=runs))
    return rows


def _spread(metric: str, values: Sequence[float], unit: str = "points") -> list[Row]:
    """The mean, and from two values on their standard deviation."""
    rows = [new_row(BENCHMARK, metric, statistics.mean(values), unit, runs=len(values))]
    if len(values) > 1:
        rows.append(new_row(BENCHMARK, f"{metric}_sd", statistics.stdev(values), unit, runs=len(values)))
    return rows


if __name__ == "__main__":
    raise SystemExit(guarded(main))
