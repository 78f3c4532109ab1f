"""Each step on texts that it must keep, mend or drop, beside the libraries that it calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.progress import Silent
from penjing.core.text.corpus import heldout_text
from penjing.curate.documents import debian
from penjing.curate.documents.document import Document
from penjing.curate.documents.markup import html_text, roff_text
from penjing.curate.documents.read import conversation_text
from penjing.curate.steps.base import StepConfig
from penjing.curate.steps.clean import CleanStep
from penjing.curate.steps.decontaminate import DecontaminateStep
from penjing.curate.steps.dedup import DedupStep
from penjing.curate.steps.language import detect, language_model
from penjing.curate.steps.rules import RulesStep
from tests.curate.corpus import prose

pytest.importorskip("ftfy")
pytest.importorskip("datatrove")


def document(text: str, language: str = "") -> Document:
    return Document("d", text, "s", "made", language=language)


def applied(step: StepConfig, text: str, folder: Path, language: str = "") -> tuple[str | None, str]:
    """(Rule that was broken, text afterwards)."""
    step.prepare(folder)
    each = document(text, language)
    return step.filter(folder).apply(each), each.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cafÃ© â€” naÃ¯ve", "café — naïve"),
        ("Ame\u0301lie", "Amélie"),
        ("one \r\ntwo\t\n\n\n\n\n\nthree\x00\x08", "one\ntwo\n\n\nthree"),
        ("  indented: “quotes”, ﬁ, &amp; stay", "  indented: “quotes”, ﬁ, &amp; stay"),
        ("Words, Case and (punctuation) stay!", "Words, Case and (punctuation) stay!"),
    ],
)
def test_clean_mends_what_was_not_meant(tmp_path: Path, before: str, after: str) -> None:
    assert applied(CleanStep(kind="clean"), before, tmp_path) == (None, after)


def test_clean_drops_by_length(tmp_path: Path) -> None:
    assert applied(CleanStep(kind="clean", shortest=5), " a ", tmp_path)[0] == "too short"
    assert applied(CleanStep(kind="clean", longest=5), "longer", tmp_path)[0] == "too long"


COUNT = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ENGLISH = " ".join(
    f"This is sentence number {COUNT[index % 10]} of the text, and it says that {prose(index, 6)} of all the people "
    "who have been with us."
    for index in range(12)
)
CHINESE = "这是一个关于文档处理的段落，它说明了如何清理文本并保留有用的内容。" + "".join(
    f"我们在第{number}节中讨论了不同的方法和结果，" for number in "一二三四五六七八九十"
)


def test_rules_are_datatroves_on_the_same_words(tmp_path: Path) -> None:
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    from penjing.curate.documents.words import WORDS

    pairs = (
        ("gopher-repetition", GopherRepetitionFilter),
        ("gopher-quality", GopherQualityFilter),
        ("fineweb", FineWebQualityFilter),
    )
    texts = [ENGLISH, "word " * 200, prose(1, 200), "short", "- a\n" * 60, ENGLISH + "\n" + "# # # #" * 60]
    for name, theirs in pairs:
        for text in texts:
            kept = theirs(language=cast(Any, WORDS)).filter(TheirDocument(text=text, id="d"))
            rule, _ = applied(RulesStep(kind="rules", sets=(name,)), text, tmp_path)  # type: ignore[arg-type]
            assert rule == (None if kept is True else f"{name}: {kept[1]}")  # type: ignore[index]


def test_rules_for_english_are_not_held_against_others(tmp_path: Path) -> None:
    step = RulesStep(kind="rules", sets=("gopher-quality",))
    assert applied(step, ENGLISH, tmp_path)[0] is None
    assert applied(step, CHINESE, tmp_path, "en")[0] == "gopher-quality: gopher_below_avg_threshold"
    assert applied(step, CHINESE, tmp_path, "zh")[0] is None
    assert applied(step, prose(3, 100), tmp_path, "en")[0] == "gopher-quality: gopher_enough_stop_words"
    assert applied(step, prose(3, 100), tmp_path, "de")[0] is None


def test_limits_can_be_changed_and_unknown_ones_are_named(tmp_path: Path) -> None:
    step = RulesStep(kind="rules", sets=("gopher-quality",), limits={"min_doc_words": 2, "min_stop_words": 0})
    assert applied(step, "few words here", tmp_path)[0] is None
    with pytest.raises(ConfigError, match="limits: nonsense unknown; these sets have char_duplicates_ratio"):
        parse_config(RulesStep, {"kind": "rules", "sets": ["fineweb"], "limits": {"nonsense": 1}}, "recipe")


def test_limits_of_runs_of_words_can_be_changed(tmp_path: Path) -> None:
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.filters import GopherRepetitionFilter

    from penjing.curate.documents.words import WORDS

    text = f"{prose(1, 100)} {prose(2, 10)} {prose(2, 10)} {prose(3, 30)} " + " ".join(["one two"] * 8)
    for limits, top, dup in (
        ({}, ((2, 0.2), (3, 0.18), (4, 0.16)), ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1))),
        ({"top_2_grams": 0.01}, ((2, 0.01),), ()),
        ({f"dup_{n}_grams": 0.0 for n in range(5, 10)} | {"dup_10_grams": 0.02}, (), ((10, 0.02),)),
        ({f"dup_{n}_grams": 0.9 for n in range(5, 11)}, (), ()),
    ):
        theirs = GopherRepetitionFilter(top_n_grams=top, dup_n_grams=dup, language=cast(Any, WORDS))  # type: ignore
        kept = theirs.filter(TheirDocument(text=text, id="d"))
        step = parse_config(RulesStep, {"kind": "rules", "sets": ["gopher-repetition"], "limits": limits}, "recipe")
        rule = None if kept is True else f"gopher-repetition: {kept[1]}"  # type: ignore[index]
        assert applied(step, text, tmp_path)[0] == rule
    with pytest.raises(ConfigError, match="limits: top_n_grams unknown; these sets have dup_10_grams, dup_5_grams"):
        parse_config(RulesStep, {"kind": "rules", "limits": {"top_n_grams": 1}}, "recipe")


def test_a_step_has_a_filter() -> None:
    class Nothing(StepConfig):
        """Says nothing of its work."""

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]


def test_blanks_take_no_more_than_a_look_each(tmp_path: Path) -> None:
    text = f"a{' ' * 300_000}b {chr(0x3000) * 300_000}c \t \nd"  # n² steps are hours
    assert applied(CleanStep(kind="clean"), text, tmp_path)[1] == text.replace(" \t \n", "\n")


def test_c4_takes_out_lines(tmp_path: Path) -> None:
    text = "A line that ends well, as it must.\nMenu\n" + "Another line that has a sentence in it.\n" * 4
    rule, after = applied(RulesStep(kind="rules", sets=("c4",)), text, tmp_path)
    assert rule is None
    assert "Menu" not in after


def test_decontamination_finds_runs_of_evaluation_texts(tmp_path: Path) -> None:
    step = DecontaminateStep(kind="decontaminate")
    words = heldout_text().split()
    assert applied(step, f"{prose(1)} {' '.join(words[5000:5030])} {prose(2)}", tmp_path)[0] is not None
    assert applied(step, f"{prose(1)} {' '.join(words[5000:5010])} {prose(2)}", tmp_path)[0] is None
    own = tmp_path / "own.txt"
    own.write_text(prose(7, 40))
    mine = DecontaminateStep(kind="decontaminate", against=(str(own),), words=8, runs=2)
    assert applied(mine, " ".join(prose(7, 40).split()[3:12]), tmp_path)[0] is not None
    assert applied(mine, " ".join(prose(7, 40).split()[3:11]), tmp_path)[0] is None


def test_messages_in_parts_are_read_as_their_text(tmp_path: Path) -> None:
    words = "the quick brown fox jumps over a lazy dog beside the river bank tonight"
    parts = [{"type": "text", "text": each} for each in ("What\n", "is?")]
    said = [
        {"role": "user", "content": [{"type": "image"}, *parts]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": [{"type": "text", "text": words}]},
    ]  # fmt: skip
    assert conversation_text(said) == f"What\nis?\n\n{words}"
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"messages": said}))
    step = DecontaminateStep(kind="decontaminate", against=(str(own),))
    step.prepare(tmp_path)
    assert (
        step.filter(tmp_path).apply(Document("d", f"Once more: {words}.", "s", "d")) == "stands in an evaluation text"
    )


@pytest.mark.parametrize("messages", [None, ["a text"]])
def test_evaluation_texts_that_are_no_conversations_are_named(tmp_path: Path, messages: object) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"messages": messages}))
    step = DecontaminateStep(kind="decontaminate", against=(str(own),))
    with pytest.raises(InputError, match=r"steps.against: .*own.jsonl, line 1: messages must be a list of objects"):
        step.prepare(tmp_path)


def test_keys_have_a_scope_and_tables_differ_by_their_numbers() -> None:
    near = DedupStep(kind="dedup").keys()
    rows = ["\n".join(f"{row}, {row * factor}, {row + factor}" for row in range(40)) for factor in (3, 7)]
    assert not (near(document(rows[0])) == near(document(rows[1]))).any()
    assert (near(document(ENGLISH)) == near(document(ENGLISH))).all()
    scoped = DedupStep(kind="dedup", scope="language").keys()
    assert not (scoped(document(ENGLISH, "en")) == scoped(document(ENGLISH, "de"))).any()


def test_languages_are_told() -> None:
    try:
        model = language_model()
    except SetupError as error:
        pytest.skip(f"no network: {error}")
    texts = {
        "en": "The quick brown fox jumps over the lazy dog and runs away.",
        "de": "Der schnelle braune Fuchs springt über den faulen Hund.",
        "fr": "Le renard brun saute par-dessus le chien paresseux.",
        "es": "El zorro marrón salta sobre el perro perezoso.",
        "ja": "茶色の狐が怠け者の犬を飛び越えます。",
        "ru": "Быстрая коричневая лиса прыгает через ленивую собаку.",
    }
    assert {language: detect(model, text)[0] for language, text in texts.items()} == {each: each for each in texts}
    assert detect(model, "12 + 3 = 15 !?") == ("", 0.0)
    assert detect(model, "Deutsch ist eine Sprache.\n" * 5000)[0] == "de"


def test_manual_pages_and_web_pages_become_text() -> None:
    page = r""".\" comment
.de XX
hidden
..
.TH LS 1
.SH NAME
ls \- list \fIdirectory\fR contents
.SH "SEE ALSO"
.BR dir (1),
\(lqquoted\(rq, 3\(mu4, \[u00E9]
.PP
New.
.nf
  kept  as it is
.fi
"""
    assert roff_text(page) == (
        "NAME\nls - list directory contents\n\nSEE ALSO\ndir(1), “quoted”, 3×4, é\n\nNew.\n  kept  as it is\n"
    )
    pytest.importorskip("trafilatura")
    web = f"<html><body><nav>Home | About</nav><article><h1>Title</h1><p>{ENGLISH}</p></article></body></html>"
    assert ENGLISH[:200] in html_text(web)
    assert "About" not in html_text(web)
    assert html_text("") == ""


def test_packages_of_debian_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setenv("PENJING_CACHE", str(tmp_path))
    calls: list[list[str]] = []

    def call(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if command[:2] == ["apt-get", "download"] and command[2] == "some-doc":
            (folder / "some-doc_1.deb").touch()
        elif command[0] == "dpkg":
            (folder / "usr").mkdir()
        else:
            return subprocess.CompletedProcess(command, 100, "", "E: Unable to locate package none\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(debian, "_call", call)
    monkeypatch.setattr(debian.shutil, "which", lambda name: name)
    for _ in range(2):
        assert [path.name for path in debian.fetch_debian("some-doc", Silent()).iterdir()] == ["usr"]
    assert len(calls) == 2
    with pytest.raises(SetupError, match=r"cannot fetch none \(E: Unable to locate package none\)"):
        debian.fetch_debian("none", Silent())
    with pytest.raises(ConfigError, match="is no name of a Debian package"):
        debian.fetch_debian("--help", Silent())
