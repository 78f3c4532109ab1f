"""Measure `penjing curate media`: how many images one core reads, and what a second process gains.

    git clone https://github.com/EliSchwartz/imagenet-sample-images    # 1000 pictures, about 500 pixels wide, 107 MB
    python benchmarks/run_media.py imagenet-sample-images              # two minutes; appends rows

`images` and `megabytes` (of files) are those of a second of one thread's processor time, for what processes share:
read, turned, stored again, hashed; beside Pillow alone, which decodes the same files and stores them with the same
settings. `once` is the part that one process does in the end, beside it: who is there twice, tars, records. `workers_2`
is how many times as fast two processes are for the whole command, by the clock, which other work makes smaller.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

from lib.models import say, warn_if_busy
from lib.rows import RESULTS, append, new_row
from PIL import Image

from penjing.core.cli import guarded
from penjing.core.errors import InputError
from penjing.curate.media.run import curate_media
from penjing.curate.media.tasks import make_media_plan, run_media_task

MORE = {"Pillow": version("pillow"), "ImageHash": version("ImageHash")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, help="a folder of JPEG files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warn_if_busy()
    files = sorted(path for path in arguments.pictures.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise InputError(f"{arguments.pictures} holds no JPEG files; see {Path(__file__).name} --help")
    names = [(path.name, path) for path in files]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in ("tasks", "pillow", "once", "one process", "two processes")}

    def took(name: str, began: float, now: float) -> None:
        seconds[name].append(now - began)
        say(f"{name}: {now - began:.1f} s")

    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as work:
            plan = make_media_plan(Path(work), names, 50_000_000, 32)
            began = time.process_time()
            for task in range(len(plan.tasks)):
                run_media_task(plan, task)
            took("tasks", began, time.process_time())
        began = time.process_time()
        for path in files:
            again(path)
        took("pillow", began, time.process_time())
        for name, workers in (("one process", 1), ("two processes", 2)):
            with tempfile.TemporaryDirectory() as folder:
                start, used = time.monotonic(), time.process_time()
                curate_media(arguments.pictures, Path(folder) / "out", workers=workers, most_damaged=1)
                took(name, start, time.monotonic())
                if workers == 2:  # reading is the children's
                    took("once", used, time.process_time())
                shutil.rmtree(Path(folder) / "out")
    middle = {name: median(each) for name, each in seconds.items()}
    pillow, runs = f"Pillow {version('pillow')}, decoded and stored", arguments.rounds
    gain = middle["one process"] / middle["two processes"]
    rows = [
        new_row(
            "media", "images", len(files) / middle["tasks"], "images/s", runs=runs, more_versions=MORE, baseline=pillow,
            baseline_value=len(files) / middle["pillow"],
        ),
        new_row("media", "megabytes", megabytes / middle["tasks"], "MB/s", runs=runs, more_versions=MORE),
        new_row("media", "once", len(files) / middle["once"], "images/s", runs=runs, more_versions=MORE),
        new_row("media", "workers_2", gain, "times", runs=runs, more_versions=MORE),
    ]  # fmt: skip
    append("media", rows, arguments.results)
    return 0


def again(path: Path) -> bytes:
    """The picture stored anew, by Pillow alone."""
    out = io.BytesIO()
    with Image.open(path) as image:
        image.convert("RGB").save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(guarded(main))
