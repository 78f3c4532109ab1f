"""A pruned network learns its own answers again: how near to the whole network it is before and behind it.

    penjing import build/build_lite0.py:build build/lite0 --size 224x224 --fit cover --resize 256x256 \\
        --mean 0.498,0.498,0.498 --std 0.502,0.502,0.502 --meaning classes --weights EFFICIENTNET-LITE0.pth
    python benchmarks/run_teaching.py --model build/lite0 --pictures build/imagenet-sample-images build/imagen
    python benchmarks/run_teaching.py --model build/lite0 --updates 40 --rate 3e-4 --batch-norms learn

benchmarks/run_graph_chain.py says what `build` is, benchmarks/lib/photos.py where the pictures are from. The network
expects pixels of -1 to 1, as the mean and the deviation say.

The pruned network and what each setting makes of it lie in `--work` and are not made anew; training goes on from its
last state. Both are judged on the held-out eighth of the pictures, which no run sees: `agreement` is the share of
classes that are as the whole network says, `kl` the mean divergence from its probabilities, with a row for the network
that was not taught. A row's name says how it was taught: rate, updates, and whether batch norms learnt. The rate was
chosen on those pictures, so `--sources` judges on photographs of other packages too, by which nothing was chosen
(`…_on_photographs`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from lib.models import say
from lib.photos import cut_photos, cut_pictures
from lib.rows import RESULTS, Row, append, new_row
from run_graph import UNITS, Values, inputs_of, quality

from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.graph import load_network
from penjing.core.cli import guarded
from penjing.core.config import dump_toml
from penjing.core.errors import SetupError
from penjing.train.families.graph import laid_out, rebuilt

JUDGED = ("agreement", "kl")
BATCH = 25


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder of 'penjing import' that knows its pixels")
    parser.add_argument("--pictures", type=Path, nargs="+", default=[], help="folders of pictures, cut once")
    parser.add_argument("--sources", type=Path, help="unpacked packages with photographs, to judge on too")
    parser.add_argument("--work", type=Path, default=Path("build/teaching"), help="folder of the runs")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the channels that leaves")
    parser.add_argument("--seen", type=int, default=192, help="pictures that choose channels and estimate batch norms")
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--batch", type=int, default=16, help="pictures of an update")
    parser.add_argument("--rate", type=float, default=5e-5, help="peak of the learning rate")
    parser.add_argument("--batch-norms", choices=("learn", "keep"), default="keep")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the parts of pictures")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    pictures = arguments.work / "pictures"
    if not pictures.exists():
        say("cuts pictures")
        cut_pictures(arguments.pictures, partly := arguments.work / "pictures.partial")
        partly.rename(pictures)
    case, seen = arguments.model.name, pictures / "seen"
    pruned = arguments.work / f"{case}-{arguments.ratio:g}"
    step = {"kind": "prune", "method": "taylor", "rank": "global", "ratio": arguments.ratio, "round_to": 8}
    compress(arguments.model, pruned, seen, step, arguments.seen)
    said = f"{arguments.updates}-updates-{arguments.rate:g}-{arguments.batch_norms}-seed-{arguments.seed}"
    taught = arguments.work / f"{pruned.name}-{said}"
    compress(pruned, taught, seen, lessons(arguments), arguments.seen)
    networks = {"pruned": pruned, said: taught}
    rows = rows_of(arguments, networks, pictures / "held")
    if arguments.sources is not None:
        photographs = arguments.work / "photographs"
        if not photographs.exists():
            cut_photos(arguments.sources, partly := arguments.work / "photographs.partial")
            partly.rename(photographs)
        rows += rows_of(arguments, networks, photographs / "held", "_on_photographs")
    append("teaching", rows, arguments.results)
    return 0


def lessons(arguments: argparse.Namespace) -> dict[str, object]:
    """The step of recipes/graph-int8.toml that teaches, with the settings that are compared."""
    return {
        "kind": "distill",
        "teacher": str(arguments.model),
        "steps": arguments.updates,
        "batch_size": arguments.batch,
        "seed": arguments.seed,
        "learning_rate": {"kind": "cosine", "peak": arguments.rate, "warmup": 0.1},
        "optimizer": {"name": "adamw", "weight_decay": 0.0},
        "batch_norms": arguments.batch_norms,
        "flip": True,
        "scale": 0.5,
        "colour": 0.2,
        "evaluation_samples": 0,
        "checkpoint_every": 10,
    }


def compress(model: Path, output: Path, seen: Path, step: dict[str, object], images: int) -> None:
    """`penjing compress` with one step, where its output is not there yet.

    Raises:
        SetupError: it failed.
    """
    if output.exists():
        return
    recipe = output.with_name(f"{output.name}.toml")
    settings = {
        "model": str(model),
        "output": str(output),
        "data": {"source": str(seen), "images": images, "batch_images": 32, "held_out": 0.01, "workers": 1},
        "evaluate": {"images": 16, "metric": "agreement"},
        "guard": {"accuracy_points": 100, "retries": 0},
        "measure": {"rounds": 0},
        "steps": [step],
    }
    recipe.write_text(dump_toml(settings), encoding="utf-8")
    say(f"makes {output}")
    command = [str(Path(sys.executable).with_name("penjing")), "compress", str(recipe)]
    if subprocess.run(command, check=False).returncode:
        raise SetupError(f"'{' '.join(command)}' failed; the same call of this script goes on from there")


def rows_of(arguments: argparse.Namespace, networks: dict[str, Path], held: Path, where: str = "") -> list[Row]:
    """Rows of each network beside the whole one, on the pictures in `held`."""
    count = sum(1 for _ in held.iterdir())
    data = DataSettings(source=str(held), images=count, held_out=0.0, batch_images=BATCH, workers=1)
    images = inputs_of(arguments.model, data)
    say(f"judges on {len(images)} pictures")
    wanted = answers(arguments.model, images)
    found = {name: quality(wanted, answers(folder, images)) for name, folder in networks.items()}
    case = f"{arguments.model.name}-{arguments.ratio:g}"
    return [
        new_row("teaching", f"{case}/{name}/{figure}{where}", each[figure], UNITS[figure], runs=1)
        for name, each in found.items()
        for figure in JUDGED
    ]


@torch.no_grad()
def answers(folder: Path, images: Values) -> Values:
    """(N, classes) of a checkpoint, in evaluation mode."""
    model = laid_out(rebuilt(load_network(folder)), torch.device("cpu")).eval()
    parts = torch.from_numpy(images).split(BATCH)
    return np.concatenate([model(part.contiguous(memory_format=torch.channels_last))[0].numpy() for part in parts])


if __name__ == "__main__":
    sys.exit(guarded(main))
