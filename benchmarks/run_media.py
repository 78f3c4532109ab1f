"""Measure `penjing curate media`: how many images one core reads, and what a second process gains.

    git clone https://github.com/EliSchwartz/imagenet-sample-images    # 1000 pictures, about 500 pixels wide, 107 MB
    python benchmarks/run_media.py imagenet-sample-images              # two minutes; appends rows
    python benchmarks/run_media.py imagenet-sample-images --clock      # workers_2 alone, on a machine that is quiet

`images` and `megabytes` (of files) are those of a second of one thread's processor time, for what processes share:
read, turned, stored again, hashed; beside Pillow alone, which decodes the same files and stores them with the same
settings. `once` is the part that one process does in the end: who is there twice, tars, records. `workers_2` is how
many times as fast two processes are for the whole command, by the clock, which other work makes smaller.
"""

from __future__ import annotations

import argparse
import io
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
from penjing.core.text.source_files import files_below
from penjing.curate.media.run import curate_media
from penjing.curate.media.tasks import make_media_plan, run_media_task

MORE = {"Pillow": version("pillow"), "ImageHash": version("ImageHash")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, help="a folder of JPEG files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clock", action="store_true", help="measure what two processes gain")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warn_if_busy()
    files = sorted(path for path in files_below(arguments.pictures) if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise InputError(f"{arguments.pictures} holds no JPEG files; see {Path(__file__).name} --help")
    names = [(path.relative_to(arguments.pictures).as_posix(), path) for path in files]
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in ("tasks", "pillow", "once", "one process", "two processes")}

    def took(name: str, began: float, now: float) -> None:
        seconds[name].append(now - began)
        say(f"{name}: {now - began:.1f} s")

    def run(workers: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            curate_media(arguments.pictures, Path(folder) / "out", workers=workers, most_damaged=1)

    runs = arguments.rounds
    if arguments.clock:
        for _ in range(runs):
            for name, workers in (("one process", 1), ("two processes", 2)):
                began = time.monotonic()
                run(workers)
                took(name, began, time.monotonic())
        gain = median(seconds["one process"]) / median(seconds["two processes"])
        append(
            "media", [new_row("media", "workers_2", gain, "times", runs=runs, more_versions=MORE)], arguments.results
        )
        return 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            (work := Path(folder) / "out-work").mkdir()
            (work / ".lock").touch()
            plan = make_media_plan(work, names, 50_000_000, 32)
            began = time.process_time()
            for task in range(len(plan.tasks)):
                run_media_task(plan, task)
            took("tasks", began, time.process_time())
            began = time.process_time()
            curate_media(arguments.pictures, out, most_damaged=1)  # which finds the tasks done
            took("once", began, time.process_time())
        began = time.process_time()
        for path in files:
            again(path)
        took("pillow", began, time.process_time())
    middle = {name: median(each) for name, each in seconds.items() if each}
    speed, theirs = len(files) / middle["tasks"], len(files) / middle["pillow"]
    pillow = f"Pillow {version('pillow')}, decoded and stored"
    rows = [
        new_row(
            "media", "images", speed, "images/s", runs=runs, baseline=pillow, baseline_value=theirs, more_versions=MORE
        ),
        new_row("media", "megabytes", megabytes / middle["tasks"], "MB/s", runs=runs, more_versions=MORE),
        new_row("media", "once", len(files) / middle["once"], "images/s", runs=runs, more_versions=MORE),
    ]
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
