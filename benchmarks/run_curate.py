"""Measure curation of text beside datatrove: signatures, clusters of near duplicates, languages, rules.

    python benchmarks/run_curate.py          # a quarter of an hour; appends rows; fetches 60 MB of Debian's packages
    python benchmarks/run_curate.py --only workers    # one process beside two, on a machine that is quiet otherwise
    python benchmarks/run_curate.py --only scale      # the same text ten and a hundred times, a quarter of an hour

Speeds are of one thread in seconds of processor time, so that a shared machine tells less of itself; contestants take
turns, and medians count. `signatures` are MinHash signatures of 14 × 8 over runs of five words; datatrove is given a
plain splitter of words, as its own (spaCy) takes five times as long. `kept_…` are the documents that deduplication
keeps of a corpus, and `same_…` the share of documents that stand in the same cluster for both: theirs run as their
stages 1 to 3. `language_right_…` is the share of manual pages of 1 kB and more whose language is told as their folder
says. `workers_2` is how many times as fast two processes make a corpus of the kernel's documents as one does, by the
clock: cleaned, languages told, filtered, each kept once; `workers_2_work` is their processor time over its.
`scale_N_cost` is the processor time that `penjing curate` takes for a megabyte where there is N times as much text,
over that where there is once as much, and `scale_N_memory` what each further document adds to the peak of memory. The
texts are N copies of the kernel's documents with the letters of each copy changed, so that they are as unlike as
different documents; they are cleaned, filtered and deduplicated in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from lib.models import say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row

from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.progress import Silent
from penjing.core.text.near_duplicates import Signer, connected
from penjing.core.text.records import Damage
from penjing.curate.documents.document import Document
from penjing.curate.documents.read import read_source, source_files
from penjing.curate.documents.settings import SourceConfig
from penjing.curate.recipe import CurateRecipe
from penjing.curate.run import curate_recipe
from penjing.curate.steps.clean import CleanStep
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.steps.language import LanguageStep, detect, language_model
from penjing.curate.steps.rules import Rules, RulesStep

DOCS = Path("usr/share/doc")
CORPORA = {
    "kernel": SourceConfig(
        name="kernel", packages=("linux-doc-6.1",), path=DOCS, files=("*/networking/*", "*/admin-guide/*")
    ),
    "python": SourceConfig(
        name="python", packages=("python3.11-doc",), path=DOCS, files=("*.rst.txt", "*/library/*.html")
    ),
    "manuals": SourceConfig(
        name="manuals", packages=("manpages-zh", "manpages-de", "manpages-es"), path=Path("usr/share/man"), form="roff"
    ),
}  # fmt: skip
CHILD = """
from pathlib import Path
from penjing.core.cli import main
try:
    main()
finally:
    print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
SCALES, SCALED = (1, 10, 100), 400  # copies, of so many documents
LANGUAGES = ("de", "es", "fr", "pl", "ru", "ja", "zh")
PEER = f"datatrove {version('datatrove')}"
MORE = {"datatrove": version("datatrove"), "fasttext": version("fasttext-numpy2-wheel")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("workers", "scale"), help="measure this alone")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warn_if_busy()
    if arguments.only == "workers":
        append("curate", worker_rows(arguments.rounds), arguments.results)
        return 0
    if arguments.only == "scale":
        append("curate", scale_rows(), arguments.results)
        return 0
    corpora = {name: texts_of(source) for name, source in CORPORA.items()}
    for name, texts in corpora.items():
        say(f"{name}: {len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} M characters")
    rows = speed_rows(corpora["kernel"] + corpora["manuals"], arguments.rounds)
    for name, texts in corpora.items():
        rows += cluster_rows(name, texts)
    rows += language_rows() + worker_rows(arguments.rounds)
    append("curate", rows, arguments.results)
    return 0


def worker_rows(rounds: int) -> list[Row]:
    """One process beside two: seconds of a whole run, from the files to the corpus."""
    steps = (
        CleanStep(kind="clean"), LanguageStep(kind="language"), RulesStep(kind="rules"), DedupStep(kind="dedup"),
    )  # fmt: skip
    language_model()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    work: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(rounds):
        for workers in seconds:
            with tempfile.TemporaryDirectory() as folder:
                recipe = CurateRecipe(
                    output=Path(folder) / "corpus",
                    workers=workers,
                    task_mb=0.2,
                    sources=(CORPORA["kernel"],),
                    steps=steps,
                )
                began, used = time.monotonic(), sum(os.times()[:4])
                curate_recipe(recipe, "benchmarks/run_curate.py")
                seconds[workers].append(time.monotonic() - began)
                work[workers].append(sum(os.times()[:4]) - used)
            say(f"round {turn + 1}/{rounds}: {workers} processes {seconds[workers][-1]:.1f} s, "
                f"{work[workers][-1]:.1f} s of processors")  # fmt: skip
    ratio, cost = (median(each[1]) / median(each[2]) for each in (seconds, work))
    return [
        new_row("curate", "workers_2", ratio, "times", runs=rounds, more_versions=MORE),
        new_row("curate", "workers_2_work", 1 / cost, "times", runs=rounds, more_versions=MORE),
    ]


def scale_rows() -> list[Row]:
    """Once, ten and a hundred times a text of a megabyte and a half: processor time and memory as it grows."""
    texts = [text for text in texts_of(CORPORA["kernel"]) if len(text) < 20_000][:SCALED]
    costs: dict[int, float] = {}
    peaks: dict[int, tuple[int, int]] = {}
    for times in SCALES:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            size = 0
            for copy in range(times):
                lines = [json.dumps({"text": changed(text, copy)}, ensure_ascii=False) for text in texts]
                (folder / f"{copy:03}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
                size += sum(map(len, lines))
            recipe = folder / "recipe.toml"
            steps = "".join(f'[[steps]]\nkind = "{kind}"\n' for kind in ("clean", "dedup"))
            rules = '[[steps]]\nkind = "rules"\nsets = ["gopher-repetition"]\n'
            source = f'[[sources]]\nname = "text"\npath = "{folder}"\nfiles = ["*.jsonl"]\nform = "records"\n'
            recipe.write_text(f'output = "{folder}/corpus"\nworkers = 1\n{source}{rules}{steps}', encoding="utf-8")
            process = subprocess.Popen([sys.executable, "-c", CHILD, "curate", str(recipe)], stdout=subprocess.PIPE)
            assert process.stdout is not None
            said = process.stdout.read().split()
            _, code, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(code)
            if code:
                raise SetupError(f"penjing curate ended with {process.returncode}; see above")
        costs[times] = (used.ru_utime + used.ru_stime) / (size / 1e6)
        peaks[times] = (len(texts) * times, int(said[-1]) * 1024)
        say(f"{times} times: {costs[times]:.3f} s a MB of {size / 1e6:.1f}, {int(said[-1]) / 1024:.0f} MB at most")
    rows = []
    for before, times in pairwise(SCALES):
        ratio = costs[times] / costs[SCALES[0]]
        grown = (peaks[times][1] - peaks[before][1]) / (peaks[times][0] - peaks[before][0])
        rows += [
            new_row("curate", f"scale_{times}_cost", ratio, "times", runs=1, more_versions=MORE),
            new_row("curate", f"scale_{times}_memory", grown, "bytes a document", runs=1, more_versions=MORE),
        ]
    return rows


def changed(text: str, copy: int) -> str:
    """`text` with each of its small letters moved on by `copy` places in an alphabet of 52 letters."""
    letters = "abcdefghijklmnopqrstuvwxyzабвгдежзийклмнопрстуфхцчшщъ"[:52]
    return text.translate({ord(a): letters[(at + copy) % 52] for at, a in enumerate(letters)} if copy else {})


def texts_of(source: SourceConfig) -> list[str]:
    """The texts of a source that are not empty."""
    found = []
    for file in source_files(0, source, Silent()):
        found += [each.text for each in read_source(file, source) if isinstance(each, Document) and each.text.strip()]
    return found


def speed_rows(texts: list[str], rounds: int) -> list[Row]:
    """Megabytes of UTF-8 a second, one thread."""
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    signer, theirs = Signer(), their_signer()
    model, rules = language_model(), Rules(RulesStep(kind="rules"))
    work: dict[str, Callable[[str], Any]] = {
        "ours": signer.signature,
        "theirs": lambda text: theirs.get_signature(shingles) if (shingles := theirs.get_shingles(text)).size else None,
        "language": lambda text: detect(model, text),
        "rules": lambda text: rules.apply(Document("d", text, "s", "d")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds):
        for name, each in work.items():
            began = time.process_time()
            for text in texts:
                each(text)
            seconds[name].append(time.process_time() - began)
            say(f"round {turn + 1}/{rounds}: {name} {megabytes / seconds[name][-1]:.2f} MB/s")
    speed = {name: megabytes / median(each) for name, each in seconds.items()}
    return [
        new_row(
            "curate", "signatures", speed["ours"], "MB/s", runs=rounds, baseline=f"{PEER}, plain words",
            baseline_value=speed["theirs"], more_versions=MORE,
        ),
        new_row("curate", "language", speed["language"], "MB/s", runs=rounds, more_versions=MORE),
        new_row("curate", "rules", speed["rules"], "MB/s", runs=rounds, more_versions=MORE),
    ]  # fmt: skip


def their_signer(folder: str = "/nonexistent") -> Any:
    """datatrove's first stage on plain words, with numbers kept: else tables that differ in them alone are equal."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.text import TextNormConfig

    from penjing.curate.documents.words import WORDS

    config = MinhashConfig(norm_config=TextNormConfig(norm_numbers=False))
    return MinhashDedupSignature(folder, config, language=WORDS)  # pyright: ignore[reportArgumentType]


def cluster_rows(name: str, texts: list[str]) -> list[Row]:
    """What both keep of a corpus, and whether they mean the same documents."""
    signer = Signer()
    keys = np.stack([signer.keys(text) for text in texts])
    ours = connected(keys.T, len(texts))
    theirs = their_clusters(texts)
    kept, their_kept = len(np.unique(ours)), len(np.unique(theirs))
    same = float((ours == theirs).mean())
    say(f"{name}: {kept:,} kept by us, {their_kept:,} by {PEER}, {same:.2%} in the same cluster")
    return [
        new_row(
            "curate", f"kept_{name}", kept, "documents", runs=1, baseline=PEER, baseline_value=their_kept,
            more_versions=MORE,
        ),
        new_row("curate", f"same_{name}", 100 * same, "%", runs=1, more_versions=MORE),
    ]  # fmt: skip


def their_clusters(texts: list[str]) -> np.ndarray:
    """For each document the first of its cluster by datatrove's stages 1 to 3."""
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.dedup.minhash import MinhashDedupBuckets, MinhashDedupCluster

    with tempfile.TemporaryDirectory() as folder:
        stage = their_signer(f"{folder}/signatures")
        stage.run((TheirDocument(text=text, id=str(place)) for place, text in enumerate(texts)), 0, 1)
        config = stage.config
        for rank in range(config.num_buckets):
            buckets = MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets", config=config)
            buckets.run(None, rank, config.num_buckets)  # pyright: ignore[reportArgumentType]
        joined = MinhashDedupCluster(f"{folder}/buckets", f"{folder}/clusters", config=config, save_cluster_id=True)
        joined.run(None, 0, 1)  # pyright: ignore[reportArgumentType]
        first = np.arange(len(texts))
        heads: dict[int, int] = {}
        path = Path(folder) / "clusters" / "000000.clusters"
        for document, cluster in struct.iter_unpack("<2I", path.read_bytes() if path.exists() else b""):
            first[document] = heads.setdefault(cluster, document)
    return first


def language_rows() -> list[Row]:
    """How often the language of a manual page is told rightly."""
    model, rows = language_model(), []
    for language in LANGUAGES:
        source = SourceConfig(
            name=language, packages=(f"manpages-{language}",), path=Path("usr/share/man"), form="roff",
            files=(f"{language}/*", f"{language}_*/*"),
        )  # fmt: skip
        right = total = damaged = 0
        for file in source_files(0, source, Silent()):
            for each in read_source(file, source):
                if isinstance(each, Damage):
                    damaged += 1
                elif len(each.text.encode()) >= 1000:
                    total += 1
                    right += detect(model, each.text)[0] == language
        say(f"{language}: {right} of {total} right, {damaged} damaged")
        rows.append(
            new_row("curate", f"language_right_{language}", 100 * right / total, "%", runs=1, more_versions=MORE)
        )
    return rows


if __name__ == "__main__":
    sys.exit(guarded(main))
