"""Drive penjing's commands from a store that speaks S3: sources of a corpus, a corpus, and shards of tokens.

    pip install 'penjing[remote,curate]'
    bash benchmarks/peers/s3.sh              # moto, in an environment of its own
    python benchmarks/peers/try_s3.py        # three minutes; ends with an error where something does not hold

What is read from s3:// is compared with what is read from a disk. The server is ended and started again while a model
is trained, asked with keys that it does not know, and an object is changed between two runs.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from penjing.core.files import sha256_file
from penjing.core.text.records import Record
from penjing.train.data.corpora import documents

MOTO = Path(__file__).parents[2] / "build" / "peers" / "s3" / "venv" / "bin" / "moto_server"
TINY = {
    "model.hidden_size": 64, "model.intermediate_size": 128, "model.num_hidden_layers": 2, "model.vocab_size": 512,
    "model.num_attention_heads": 1, "data.sequence_length": 64, "precision.mode": '"fp32"', "evaluation.every": 8,
    "checkpoint.every": 4, "learning_rate.warmup": 0.5,
}  # fmt: skip
RECIPE = """
output = "{output}"
task_mb = 0.2
[[sources]]
name = "s"
{source}
[[steps]]
kind = "clean"
[[steps]]
kind = "dedup"
"""


class Store:
    """A server, its port, and what it holds, which it forgets when it ends: `filled` puts it there again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folders: dict[str, Path] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, strict: bool = False) -> None:
        """Begin to answer; `strict`: to keys that it knows alone."""
        keys = {"INITIAL_NO_AUTH_ACTION_COUNT": "0"} if strict else {}
        command = [str(MOTO), "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(command, env=os.environ | keys, stderr=subprocess.DEVNULL)
        for _ in range(300):
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise TimeoutError("moto_server does not answer")

    def stop(self) -> None:
        """End at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def fill(self, **folders: Path) -> None:
        """Store folders as s3://data/NAME."""
        self.folders |= folders
        files: Any = import_module("s3fs").S3FileSystem(skip_instance_cache=True)
        if not files.exists("data"):
            files.mkdir("data")
        for name, folder in folders.items():
            files.put(f"{folder}/", f"data/{name}/", recursive=True)


def main() -> int:
    if not MOTO.exists():
        sys.exit(f"{MOTO} is missing: bash benchmarks/peers/s3.sh")
    store = Store()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.port}", "PENJING_CACHE": f"{name}/a",
            "AWS_ACCESS_KEY_ID": "one", "AWS_SECRET_ACCESS_KEY": "two", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        store.start()
        try:
            run(store, folder)
        finally:
            store.stop()
    return 0


def run(store: Store, folder: Path) -> None:
    """All that is tried."""
    texts = folder / "texts"
    write_texts(texts)
    store.fill(texts=texts)
    for where, source in (("disk", f'path = "{texts}"'), ("s3", 'address = "s3://data/texts/"')):
        recipe = folder / f"{where}.toml"
        recipe.write_text(RECIPE.format(output=folder / where, source=source))
        penjing("curate", str(recipe))
    say("curated documents", corpus_of(folder / "disk") == corpus_of(folder / "s3") != {})

    store.fill(disk=folder / "disk")  # training holds documents out by the names of folders too
    for where, source in (("disk", str(folder / "disk")), ("s3", "s3://data/disk")):
        train(folder / f"train-{where}", 8, {"data.sources": f'["{source}"]'})
    say("losses of a training from a corpus", losses(folder / "train-disk") == losses(folder / "train-s3") != [])

    packed = min((folder / "a" / "tokens").glob("*/index.json")).parent
    store.fill(shards=packed)
    shards = {"data.shards": '"s3://data/shards"'}
    train(folder / "whole", 16, shards)
    train(folder / "parts", 16, shards, "--until", "8")
    train(folder / "parts", 16, shards, "--resume", "auto")
    say("losses after a resume", losses(folder / "whole") == losses(folder / "parts"))

    os.environ["PENJING_CACHE"] = f"{folder}/b"  # nothing is in it
    store.stop()
    returns = threading.Timer(10, lambda: (store.start(), store.fill(**store.folders)))
    returns.start()
    train(folder / "outage", 16, shards)
    returns.join()
    say("losses where the server was gone for a while", losses(folder / "whole") == losses(folder / "outage"))

    store.stop()
    store.start(strict=True)
    os.environ["PENJING_CACHE"] = f"{folder}/c"
    told = penjing("curate", str(folder / "s3.toml"), "--force", code=6)
    say("keys that are not known", "does not let us in" in told)


def write_texts(folder: Path) -> None:
    """JSON lines, one file compressed, and names that need care."""
    folder.mkdir()
    found = [each.text for each in documents("builtin:prose") if isinstance(each, Record) and each.text][:160]
    names = ("plain.jsonl", "deep/er/a b.jsonl", "ä+%20.jsonl", "packed.jsonl.gz")
    for place, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps({"text": text}) + "\n" for text in found[place::4]).encode()
        path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)


def penjing(*arguments: str, code: int = 0) -> str:
    """What a command says."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("penjing")), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != code:
        raise SystemExit(f"penjing {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def train(output: Path, steps: int, settings: dict[str, Any], *more: str) -> None:
    """A few steps of a tiny decoder."""
    values = {"output": f'"{output}"', "steps": steps, **TINY, **settings}
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    penjing("train", "decoder-tiny", *sets, *more)


def losses(output: Path) -> list[Any]:
    """(Step, loss) of a run's log."""
    metrics = output.with_name(f"{output.name}-run") / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def corpus_of(folder: Path) -> dict[str, str]:
    """Shards with their hashes."""
    return {path.name: sha256_file(path) for path in sorted((folder / "shards").iterdir())}


def say(what: str, holds: bool) -> None:
    """One line, or the end."""
    print(f"{what}: {'as it should be' if holds else 'NOT AS IT SHOULD BE'}", flush=True)
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(main())
