"""Who judges what: a crowd first, experts where it disagrees or must not decide, and the step `quality` learns from
what is settled."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.text.source_files import SHARDS
from penjing.curate.annotate.agreement import dawid_skene
from penjing.curate.annotate.files import Answer, Form, read_answers, write_tasks
from penjing.curate.documents.document import Document, stored_documents


def ask(
    corpus: Path, tasks: Path, form: Form, number: int, labels: Sequence[str], domains: Sequence[str] = ()
) -> dict[str, Any]:
    """Write `number` documents of a corpus as tasks: those with the smallest hashes of their ids, so that the same are
    asked for each time; none that the step `augment` made.

    Raises:
        InputError: `corpus` is none, holds no such document, or `tasks` exists.
    """
    if not (corpus / SHARDS).is_dir():
        raise InputError(f"{corpus} is no corpus: it holds no {SHARDS}/; name the output of 'penjing curate'")
    if len(set(labels)) < 2:
        raise InputError(f"labels {', '.join(labels) or 'none'}: give two and more, such as good,bad")
    _is_new(tasks)
    chosen = heapq.nsmallest(number, _documents(corpus, domains), key=lambda each: _place(each.id))
    if not chosen:
        of = f" of {', '.join(domains)}" if domains else ""
        raise InputError(f"{corpus} holds no document{of}; there is nothing to ask")
    written = write_tasks(chosen, tasks, form, labels)
    return {"documents": len(chosen), "written": [str(path) for path in written]}


def agree(
    exports: Sequence[Path],
    labels: Path,
    experts: Path,
    *,
    least: float = 0.8,
    expert_domains: Sequence[str] = (),
    form: Form = "label-studio",
) -> dict[str, Any]:
    """What the judges of `exports` together say, by `dawid_skene`: settled ones into `labels` (JSON lines for the step
    `quality`), the others as tasks for experts.

    Args:
        least: probability from which a label is settled.
        expert_domains: documents of these are for experts whatever the crowd says.

    Returns:
        Counts, and each judge's skill.

    Raises:
        InputError: there are no answers, all are alike, a judge answered twice, or a file exists.
    """
    for path in (labels, experts):
        _is_new(path)
    answers = [answer for path in exports for answer in read_answers(path)]
    _check(answers, exports)
    documents = {answer.document: answer for answer in answers}
    judges = sorted({answer.judge for answer in answers})
    names = sorted({answer.label for answer in answers})
    places = [{name: place for place, name in enumerate(each)} for each in (documents, judges, names)]
    coded = [(places[0][each.document], places[1][each.judge], places[2][each.label]) for each in answers]
    found = dawid_skene(coded, len(documents), len(judges), len(names))
    settled, left = [], []
    for (name, answer), chances in zip(documents.items(), found.label.tolist(), strict=True):
        best = max(range(len(names)), key=chances.__getitem__)
        if chances[best] >= least and answer.domain not in expert_domains:
            row = {"text": answer.text, "label": names[best], "language": answer.language, "id": name}
            settled.append(json.dumps({**row, "probability": round(chances[best], 6)}, ensure_ascii=False) + "\n")
        else:
            left.append(Document(name, answer.text, "", answer.domain, language=answer.language))
    atomic_write_text(labels, "".join(settled))
    written = write_tasks(left, experts, form, names) if left else []
    return {
        "answers": len(answers), "settled": len(settled), "for experts": len(left),
        "written": [str(path) for path in (labels, *written)],
        "judges": {name: round(skill, 4) for name, skill in zip(judges, found.skill.tolist(), strict=True)},
    }  # fmt: skip


def _check(answers: Sequence[Answer], exports: Sequence[Path]) -> None:
    where = ", ".join(map(str, exports))
    if not answers:
        raise InputError(f"{where}: no answers; export tasks that people have judged")
    seen: set[tuple[str, str]] = set()
    for each in answers:
        if (each.document, each.judge) in seen:
            raise InputError(f"{where}: judge {each.judge} answered twice for {each.document}; keep one of the answers")
        seen.add((each.document, each.judge))
    if len({each.label for each in answers}) < 2:
        raise InputError(f"{where}: every answer is {answers[0].label!r}; nothing can be learned from one label")


def _documents(corpus: Path, domains: Sequence[str]) -> Iterator[Document]:
    for path in sorted((corpus / SHARDS).glob("*.parquet")):
        for document in stored_documents(path):
            if not document.made and (not domains or document.domain in domains):
                yield document


def _is_new(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} already exists; choose another name, or remove it")


def _place(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
