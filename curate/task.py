"""One task of a stage: its documents through the stage's steps, into a folder that appears when it is complete."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.text.records import Damage
from penjing.curate.documents.document import BEGINNING, Document, DocumentWriter, Dropped, drop, stored_documents
from penjing.curate.documents.read import read_source
from penjing.curate.plan import Plan, Stage
from penjing.curate.steps.base import Filter, Judging, Making, StepConfig
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.steps.pii import Pii, PiiStep

DOCUMENTS, DROPPED, DAMAGED, COUNTS, KEYS = (
    "documents.parquet", "dropped.jsonl.gz", "damaged.jsonl", "counts.json", "keys.npy",
)  # fmt: skip
CLUSTERS = "clusters.npy"  # of a stage: for each of its documents the first of its cluster, by place
READ = "read"
_EXAMPLES, _EXCERPT = 3, 200  # of a rule, and their characters
_LONGEST_VALUE = 8192  # characters, of a private key


def task_folder(stage: Stage, task: int) -> Path:
    """Where the results of `task` are."""
    return stage.folder / f"task-{task:05d}"


def run_task(plan: Plan, stage_number: int, task: int) -> None:
    """Do a task, unless its results are there.

    Raises:
        PenjingError: a file has changed, the disk is full, a package is missing.
    """
    stages = plan.stages
    stage, folder = stages[stage_number], task_folder(stages[stage_number], task)
    if folder.exists():
        return
    steps = [(f"{place}: {_config(plan, place).kind}", place) for place in stage.steps]
    filters = [
        (name, _config(plan, place), _config(plan, place).filter(stage.folder / f"step-{place}"))
        for name, place in steps
    ]
    counts = Counts()
    masked = mask_of(plan)
    dedup = None if stage.after is None else plan.recipe.steps[stage.after]
    keys_of = dedup.keys() if isinstance(dedup, DedupStep) else None
    keys: list[Any] = []
    with publish_folder(folder, marker=COUNTS) as partial:
        # Parquet files are closed, and so whole, before the counts are written
        with (
            DocumentWriter(partial / DOCUMENTS) as kept,
            gzip.open(partial / DROPPED, "wt", encoding="utf-8") as dropped,
            open(partial / DAMAGED, "w", encoding="utf-8") as damaged,
        ):
            for document in _coming(plan, stages, stage_number, task):
                outcomes: Iterable[Document | Dropped | Damage] = (document,)
                if isinstance(document, Document):
                    if stage_number == 0 or stage.before is not None:
                        counts.met(document, READ if stage.before is None else f"{stage.before}: dedup")
                    outcomes = _through(document, filters, counts)
                for outcome in outcomes:
                    if isinstance(outcome, Document):
                        kept.add(outcome)
                        if stage_number == len(stages) - 1:
                            counts.ended(outcome)
                        if keys_of is not None:
                            keys.append(keys_of(outcome))
                    elif isinstance(outcome, Dropped):
                        shown = replace(outcome, excerpt=_shown(outcome, masked))
                        dropped.write(json.dumps(asdict(shown), ensure_ascii=False) + "\n")
                        counts.dropped(shown)
                    else:
                        shown = replace(outcome, reason=masked(outcome.reason))
                        damaged.write(json.dumps({"id": shown.name, "reason": shown.reason}) + "\n")
                        counts.damaged(shown, met=isinstance(document, Document))
        for name, _, each in filters:
            if isinstance(each, Pii):
                counts.replaced(name, each.replaced)
            if isinstance(each, Judging):
                for said, number in each.decided.items():
                    counts.decided[f"{name}\t{said}"] += number
        if keys_of is not None:
            np.save(partial / KEYS, np.stack(keys) if keys else np.empty((0, 0), np.uint64), allow_pickle=False)
        if stage_number == 0:
            for file in plan.files[slice(*plan.tasks[task])]:
                file.check()
        atomic_write_text(partial / COUNTS, json.dumps(counts.as_json()))


class Counts:
    """What a task counts, for the report: JSON-ready, and added up over tasks by `add`."""

    def __init__(self) -> None:
        self.after: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.rules: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.examples: dict[str, list[list[str]]] = defaultdict(list)
        self.sizes: dict[str, dict[str, int]] = {"before": defaultdict(int), "after": defaultdict(int)}
        self.reasons: dict[str, int] = defaultdict(int)
        self.personal: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.decided: dict[str, int] = defaultdict(int)
        self.num_damaged, self.num_lines = 0, 0
        self.num_failed = 0
        """Of the damaged documents those that were met or made, and that a step failed on."""
        self.num_made = 0

    def met(self, document: Document, step: str) -> None:
        """A document came into the stage: from its file, or from a deduplication, as `step` says."""
        self.passed(step, document)
        if step == READ:
            self.sizes["before"][_size(document)] += 1

    def made(self, step: str, document: Document) -> None:
        """`step` made a further document."""
        self.num_made += 1
        self.passed(step, document)

    def passed(self, step: str, document: Document) -> None:
        """A document stays after `step`."""
        entry = self.after[f"{step}\t{document.domain}\t{document.language}"]
        entry[0], entry[1] = entry[0] + 1, entry[1] + len(document.text)

    def ended(self, document: Document) -> None:
        """A document is part of the corpus."""
        self.sizes["after"][_size(document)] += 1

    def dropped(self, document: Dropped) -> None:
        """A document was taken out."""
        key = f"{document.step}\t{document.rule}"
        self.rules[key][0] += 1
        self.rules[key][1] += document.chars
        if len(self.examples[key]) < _EXAMPLES:
            self.examples[key].append([document.id, document.excerpt])

    def replaced(self, step: str, found: Mapping[str, tuple[int, int]]) -> None:
        """Kind of personal data → values that `step` replaced, and documents that had any."""
        for kind, (values, documents) in found.items():
            entry = self.personal[f"{step}\t{kind}"]
            entry[0], entry[1] = entry[0] + values, entry[1] + documents

    def damaged(self, damage: Damage, *, met: bool) -> None:
        """Something could not be read, or a step failed on a document that was `met`, or made of one."""
        self.num_damaged += not damage.part
        self.num_failed += met
        self.num_lines += damage.part
        self.reasons[damage.reason.partition(":")[0].partition(" (")[0]] += 1

    def add(self, other: dict[str, Any]) -> None:
        """Add what `as_json` of another gave."""
        for name in ("after", "rules", "personal"):
            for key, (first, second) in other[name].items():
                entry = getattr(self, name)[key]
                entry[0], entry[1] = entry[0] + first, entry[1] + second
        for key, found in other["examples"].items():
            self.examples[key] = (self.examples[key] + found)[:_EXAMPLES]
        for when, sizes in other["sizes"].items():
            for size, count in sizes.items():
                self.sizes[when][size] += count
        for name in ("reasons", "decided"):
            for key, count in other[name].items():
                getattr(self, name)[key] += count
        self.num_damaged += other["num_damaged"]
        self.num_lines += other["num_lines"]
        self.num_failed += other["num_failed"]
        self.num_made += other["num_made"]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "after": self.after, "rules": self.rules, "examples": self.examples, "sizes": self.sizes,
            "reasons": self.reasons, "personal": self.personal, "decided": self.decided,
            "num_damaged": self.num_damaged, "num_lines": self.num_lines, "num_failed": self.num_failed,
            "num_made": self.num_made,
        }  # fmt: skip


def _size(document: Document) -> str:
    return str(round(math.log2(max(1, len(document.text)))))


def mask_of(plan: Plan) -> Callable[[str], str]:
    """Takes personal data out of what is said of documents, where a step of the recipe takes it out of them."""
    masks = [step.filter(plan.recipe.work_folder) for step in plan.recipe.steps if isinstance(step, PiiStep)]

    def masked(text: str) -> str:
        for mask in masks:
            text = mask.masked(text)
        return text

    return masked


def _shown(dropped: Dropped, masked: Callable[[str], str]) -> str:
    """How a dropped document began; without what may be the beginning of a value that was cut off, and so not found."""
    text = masked(dropped.excerpt)
    return (text[:-_LONGEST_VALUE] if len(dropped.excerpt) == BEGINNING else text)[:_EXCERPT]


def _config(plan: Plan, place: int) -> Any:
    return plan.recipe.steps[place]


def _read(plan: Plan, task: int) -> Iterator[Document | Damage | Dropped]:
    for file in plan.files[slice(*plan.tasks[task])]:
        for document in read_source(file, plan.recipe.sources[file.source]):
            if isinstance(document, Document) and not document.text.strip():
                yield drop(document, READ, "no text")
            else:
                yield document


def _coming(plan: Plan, stages: list[Stage], number: int, task: int) -> Iterator[Document | Damage | Dropped]:
    """What comes into a stage: from the files, from a deduplication, or as the stage before left it."""
    if number == 0:
        return _read(plan, task)
    if stages[number].before is not None:
        return _deduplicated(plan, stages, number, task)
    return stored_documents(task_folder(stages[number - 1], task) / DOCUMENTS)


def _deduplicated(plan: Plan, stages: list[Stage], number: int, task: int) -> Iterator[Document | Dropped]:
    """The documents of the stage before, each with the id of the first of its cluster; others of it dropped."""
    before, place = stages[number - 1], stages[number].before
    assert place is not None
    step = plan.recipe.steps[place]
    assert isinstance(step, DedupStep)
    first = np.load(before.folder / CLUSTERS, allow_pickle=False, mmap_mode="r")
    names = json.loads((before.folder / f"names-{task:05d}.json").read_text(encoding="utf-8"))
    begin = int(names["begin"])
    for index, document in enumerate(stored_documents(task_folder(before, task) / DOCUMENTS), begin):
        document.cluster = names["of"].get(str(int(first[index])), document.id)
        if first[index] == index or step.keep == "all":
            yield document
        else:
            dropped = drop(document, f"{place}: dedup", step.rule)
            yield Dropped(**{**asdict(dropped), "twin": document.cluster})


def _through(
    document: Document, filters: list[tuple[str, StepConfig, Filter]], counts: Counts
) -> Iterator[Document | Dropped | Damage]:
    """What becomes of `document`, and of the documents that are made of it."""
    for place, (name, config, each) in enumerate(filters):
        further: list[Document] = []
        if not config.domains or document.domain in config.domains:
            try:
                rule = each.apply(document)
                if rule is None and isinstance(each, Making):
                    further = each.made(document)
            except SetupError:
                raise  # of what the step needs for every document
            except Exception as error:  # a library that fails on a text costs that text, with its reason
                yield Damage(document.id, f"{name} failed: {type(error).__name__}: {error}")
                return
            if rule is not None:
                yield drop(document, name, rule)
                return
        counts.passed(name, document)
        for made in further:
            counts.made(name, made)
            yield from _through(made, filters[place + 1 :], counts)
    yield document
