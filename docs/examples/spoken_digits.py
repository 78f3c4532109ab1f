"""Digits spoken by espeak-ng (Debian's package) in many voices, as rows for recipes/hear-digits.toml.

python docs/examples/spoken_digits.py build/digits
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOICES = ("en-gb", "en-us", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-rp")
VARIANTS = ("m1", "m3", "m5", "f1", "f3", "f5", "croak", "whisper")
TEST = ("m5", "f5")  # speakers of whom nothing is learnt


def main(folder: Path) -> None:
    """Write wav/*.wav, learn.jsonl and test.jsonl."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("error: espeak-ng is missing; apt-get install espeak-ng")
    (folder / "wav").mkdir(parents=True, exist_ok=True)
    random, rows = np.random.default_rng(0), {"learn": [], "test": []}
    for variant in VARIANTS:
        for voice in VOICES:
            for word in WORDS:
                for take in range(2):
                    name = f"{word}-{voice}-{variant}-{take}.wav"
                    pitch, speed = random.integers(30, 70), random.integers(150, 210)
                    said = ["-v", f"{voice}+{variant}", "-p", str(pitch), "-s", str(speed), word]
                    subprocess.run(["espeak-ng", "-w", str(folder / "wav" / name), *said], check=True)
                    row = {"prompt": "<image>Which digit?", "completion": f" {word}", "images": [name]}
                    rows["test" if variant in TEST else "learn"].append(row)
    for part, each in rows.items():
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, each)) + "\n")
    print(f"{folder}: {len(rows['learn'])} recordings to learn from, {len(rows['test'])} of other speakers")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python docs/examples/spoken_digits.py FOLDER")
    main(Path(sys.argv[1]))
