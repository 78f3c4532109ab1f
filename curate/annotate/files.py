"""Files of Label Studio and Argilla: tasks for people, and what people answered.

Label Studio: https://labelstud.io/guide/tasks (tasks) and https://labelstud.io/guide/export (answers, "JSON").
Argilla: records as `Dataset.records.to_json` and `from_json` have them (https://docs.argilla.io).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.text.records import LINES, Damage, read_records
from penjing.curate.documents.document import Document

Form = Literal["label-studio", "argilla"]
QUESTION = "label"
_FACTS = ("id", "domain", "language", "source")


@dataclass(frozen=True)
class Answer:
    """What a judge said of a document, and what its task knew of that."""

    document: str
    judge: str
    label: str
    text: str
    domain: str = ""
    language: str = ""


def write_tasks(documents: Sequence[Document], path: Path, form: Form, labels: Sequence[str]) -> list[Path]:
    """Tasks for people: choose one of `labels` for each text. For Label Studio also PATH.xml, the labeling interface.

    Returns:
        What was written.
    """
    rows = [{name: getattr(each, name) for name in _FACTS} | {"text": each.text} for each in documents]
    if form == "argilla":
        tasks = [
            {"id": row["id"], "fields": {"text": row["text"]}, "metadata": {name: row[name] for name in _FACTS}}
            for row in rows
        ]
        atomic_write_text(path, json.dumps(tasks, ensure_ascii=False, indent=1) + "\n")
        return [path]
    atomic_write_text(path, json.dumps([{"data": row} for row in rows], ensure_ascii=False, indent=1) + "\n")
    choices = "".join(f"    <Choice value={quoteattr(label)}/>\n" for label in labels)
    interface = path.with_name(f"{path.name}.xml")
    atomic_write_text(
        interface,
        f'<View>\n  <Text name="text" value="$text"/>\n  <Choices name="{QUESTION}" toName="text" choice="single">\n'
        f"{choices}  </Choices>\n</View>\n",
    )
    return [path, interface]


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers in an export of Label Studio or Argilla, or in JSON lines with `id`, `text`, `annotator`, `label`.

    Raises:
        InputError: it is none of these, or an answer lacks something, by its place.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist; name what Label Studio or Argilla has exported as JSON")
    if path.suffix.lower() in LINES:
        yield from _lines(path)
        return
    try:
        tasks = json.loads(path.read_text(encoding="utf-8-sig"))  # some tools begin a file with a byte order mark
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON ({error}); export it anew, as JSON") from None
    if not isinstance(tasks, list):
        raise InputError(f"{path} holds no list of tasks; export it anew, as JSON")
    for place, task in enumerate(tasks, 1):
        where = f"{path}, task {place}"
        if not isinstance(task, dict):
            raise InputError(f"{where} is no task; export it anew, as JSON")
        if "annotations" in task:
            yield from _label_studio(task, where)
        elif "fields" in task:
            yield from _argilla(task, where)
        else:
            raise InputError(
                f"{where} has neither annotations (Label Studio) nor fields (Argilla); of Label Studio's exports take "
                '"JSON", not "JSON-MIN"'
            )


def _label_studio(task: dict[str, Any], where: str) -> Iterator[Answer]:
    facts = _dict(task.get("data"))
    for annotation in map(_dict, _list(task["annotations"])):
        if annotation.get("was_cancelled"):
            continue
        who = annotation.get("completed_by")
        judge = who.get("email") or who.get("id") if isinstance(who, dict) else who
        for result in map(_dict, _list(annotation.get("result"))):
            if result.get("type") == "choices":
                chosen = _list(_dict(result.get("value")).get("choices"))
                if len(chosen) != 1:
                    raise InputError(f"{where} has {len(chosen)} choices in one answer; allow one (choice=single)")
                yield _answer(facts, judge, chosen[0], where)


def _argilla(task: dict[str, Any], where: str) -> Iterator[Answer]:
    facts = {**_dict(task.get("metadata")), **_dict(task["fields"])}
    facts.setdefault("id", task.get("id"))
    responses = task.get("responses")
    for question, given in _dict(responses).items():
        for response in map(_dict, _list(given)):
            if question == QUESTION and response.get("status", "submitted") == "submitted":
                yield _answer(facts, response.get("user_id"), response.get("value"), where)


def _lines(path: Path) -> Iterator[Answer]:
    for record in read_records(path, path.name, "text"):
        if isinstance(record, Damage):
            raise InputError(f"{record.name}: {record.reason}; mend or remove it")
        facts = {**record.fields, "text": record.text}
        yield _answer(facts, facts.get("annotator"), facts.get("label"), record.name)


def _answer(facts: dict[str, Any], judge: Any, label: Any, where: str) -> Answer:
    for name, value in {"text": facts.get("text"), "id": facts.get("id"), "judge": judge, "label": label}.items():
        if value in (None, "") or isinstance(value, dict | list):
            raise InputError(f"{where} names no {name}; make tasks by 'penjing curate ask', which keeps what is needed")
    known = {name: str(facts.get(name) or "") for name in ("domain", "language")}
    return Answer(str(facts["id"]), str(judge), str(label), str(facts["text"]), **known)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
