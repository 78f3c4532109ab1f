"""Rows that the benchmarks of alignment teach and ask: small enough for a processor, and the same on every machine.

Answers are a few tokens long and prompts a dozen, by a template without the system turn that SmolLM2's own has. Sums
are written as "3+4=?", and only the number is wanted. The model that starts has learnt that form from a few sums of
larger numbers, "14+5=?" and "19"; one that had learnt it by saying numbers again, "7=?" and "7", said every question
again. Things are counted in JSON: "3 pears" and {"what": "pears", "many": 3}. Pairs of answers are of that form and of
another, which is what can be preferred without knowing how to add, or of a right and a wrong sum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from penjing.core.files import atomic_write_text

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LARGEST = 9  # of the two numbers of a sum
THINGS = ["pears", "cats", "trees", "books", "stones", "cups", "birds", "roads", "coins", "lamps", "doors", "ships"]

Row = dict[str, Any]


def write_tasks(folder: Path) -> None:
    """Fill `folder` with worked.jsonl, sums.jsonl, compared.jsonl, forms.jsonl, things.jsonl and template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(folder / "template.jinja", TEMPLATE)
    tasks = {"worked": worked(), "sums": sums(), "compared": compared(), "forms": forms(), "things": things()}
    for name, rows in tasks.items():
        atomic_write_text(folder / f"{name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))


def worked() -> Iterable[Row]:
    """Conversations of a sum with its answer, none of `sums`."""
    for a, b in product(range(LARGEST + 1, 2 * LARGEST + 2), range(1, LARGEST + 1)):
        yield _chat(f"{a}+{b}=?", str(a + b))


def sums() -> Iterable[Row]:
    """Each sum of two digits with its answer."""
    for a, b in product(range(LARGEST + 1), repeat=2):
        yield {"prompt": f"{a}+{b}=?", "answer": str(a + b)}


def compared() -> Iterable[Row]:
    """Each of `sums` with its answer, preferred to the answer of every other sum, and to both numbers as they stand."""
    for a, b in product(range(LARGEST + 1), repeat=2):
        total = a + b
        for wrong in sorted({*range(2 * LARGEST + 1), 10 * a + b} - {total}):
            yield _pair(f"{a}+{b}=?", str(total), str(wrong))


def forms() -> Iterable[Row]:
    """Every other of `things`, answered in the form and in one of the wrong ones in turn."""
    for place, (count, what) in enumerate(product(range(2, 22, 2), THINGS)):
        right = json.dumps({"what": what, "many": count})
        wrong = (
            f"{count} {what}",
            json.dumps({"what": what}),
            json.dumps({"what": what, "many": str(count)}),
            right.removesuffix("}"),
        )
        yield _pair(f"{count} {what}", right, wrong[place % len(wrong)])


def things() -> Iterable[Row]:
    """Conversations of a count of things, said again as JSON."""
    for count, what in product(range(2, 22), THINGS):
        yield _chat(f"{count} {what}", json.dumps({"what": what, "many": count}))


def is_valid(text: str) -> bool:
    """Whether an answer about things has the form."""
    try:
        said = json.loads(text)
    except ValueError:
        return False
    form = {"what": str, "many": int}
    return isinstance(said, dict) and {name: type(value) for name, value in said.items()} == form


def _chat(asked: str, answered: str) -> Row:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def _pair(asked: str, better: str, worse: str) -> Row:
    chosen, rejected = ([{"role": "assistant", "content": each}] for each in (better, worse))
    return {"prompt": [{"role": "user", "content": asked}], "chosen": chosen, "rejected": rejected}
