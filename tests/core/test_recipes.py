"""Recipes that come with penjing, and the keys that a recipe may hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from penjing.core import cli, recipe_keys
from penjing.core.config import Config, read_recipe
from penjing.core.errors import ConfigError, InputError
from penjing.core.recipe_keys import as_markdown, as_text, find_sections, page, recipe_sections
from penjing.core.recipes import copy_recipe, known_recipes, named_recipe, recipe_names, stage_of, summary
from tests import forking

ROOT = Path(__file__).parents[2]


class Inner(Config):
    """What lies inside."""

    depth: int = Field(default=2, ge=1, description="How deep it lies.")


class Grow(Config):
    kind: Literal["grow"] = "grow"
    rates: tuple[float, ...] = ()


class Cut(Config):
    """A cut."""

    kind: Literal["cut", "trim"]
    share: float | None = Field(default=None, gt=0, lt=1, description="What | leaves.")


class Tree(Config):
    """A tree.

    It has two paragraphs.

    Attributes:
        nothing: of interest.
    """

    folder: Path
    inner: Inner = Inner(depth=5)
    steps: tuple[Annotated[Grow | Cut, Field(discriminator="kind")], ...] = ()


class Forest(Config):
    trees: tuple[Config, ...] = Field(description="One after the other.")


def forms() -> dict[str, type[Config]]:
    return {"cut": Cut, "leaf.decoder": Inner, "leaf.moss": Grow}


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipe_keys.RECIPES, "train", f"{__name__}:Tree")


def test_every_recipe_is_known_with_a_sentence() -> None:
    found = known_recipes()
    assert [each.name for each in found] == sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
    for each in found:
        assert each.summary.endswith("."), each
        assert "`penjing" not in each.summary


def test_a_summary_is_the_first_sentence() -> None:
    assert summary("# Of 1.5 layers: `penjing train x.toml`. More.\n") == "Of 1.5 layers."
    assert summary("# On two\n# lines.\n#   a command\nsteps = 1\n") == "On two lines."
    assert summary("steps = 1\n") == ""


def test_which_stage() -> None:
    assert stage_of({"model": {"architecture": "decoder"}}, "x") == "train"
    assert stage_of({"model": "build/x"}, "x") == "compress"
    with pytest.raises(ConfigError, match="x names no model"):
        stage_of({"steps": 3}, "x")


def test_a_name_stands_for_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_recipe(Path("decoder-tiny"), ["steps=3"])["steps"] == 3
    assert read_recipe(Path("recipes/decoder-tiny.toml")) == read_recipe(Path("decoder-tiny"))
    Path("decoder-tiny").write_text("steps = 7\n")
    assert read_recipe(Path("decoder-tiny")) == {"steps": 7}  # a file comes first
    with pytest.raises(ConfigError, match=r"recipe build/decodr-tiny.toml does not exist; did you mean 'decoder-tiny'"):
        read_recipe(Path("build/decodr-tiny.toml"))
    with pytest.raises(ConfigError, match=r"recipe zzz does not exist; 'penjing recipe list' shows"):
        read_recipe(Path("zzz"))


def test_new_copies_and_does_not_replace(tmp_path: Path) -> None:
    out = tmp_path / "my.toml"
    copy_recipe("smollm2-int8", out)
    assert out.read_text() == (ROOT / "recipes/smollm2-int8.toml").read_text() == named_recipe("smollm2-int8")
    with pytest.raises(InputError, match="already exists; replace it with --force"):
        copy_recipe("decoder-tiny", out)
    copy_recipe("decoder-tiny", out, force=True)
    assert "decoder-tiny" in out.read_text()
    with pytest.raises(ConfigError, match="did you mean 'smollm2-int8'"):
        copy_recipe("smolm2-int8", tmp_path / "other.toml")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["recipe", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == recipe_names()
    for name, out, command in (
        ("decoder-tiny", tmp_path / "a.toml", f"train {tmp_path}/a.toml"),
        ("smollm2-search", tmp_path / "a search.toml", f"compress search '{tmp_path}/a search.toml'"),
    ):
        assert cli._run(["recipe", "new", name, str(out)]) == 0
        assert capsys.readouterr().err == f"wrote {out}; run it with 'penjing {command}'\n"
    assert cli._run(["recipe", "new", "decoder-tiny", str(tmp_path / "a.toml")]) == InputError.exit_code
    assert cli._run(["recipe", "keys", "train", "checkpoint"]) == 0
    assert "every: integer, at least 1 (default 1000)" in capsys.readouterr().out
    assert cli._run(["recipe", "keys", "train", "chekpoint"]) == ConfigError.exit_code
    assert "did you mean 'checkpoint'? Their sections are adapter, data.text, " in capsys.readouterr().err


@pytest.mark.usefixtures("tree")
def test_sections_are_read_from_the_settings() -> None:
    sections = {each.name: each for each in recipe_sections("train")}
    assert list(sections) == ["", "inner", "steps.grow", "steps.cut", "steps.trim"]
    assert sections[""].about == "A tree.\n\nIt has two paragraphs."
    assert [(key.name, key.type, key.default) for key in sections[""].keys] == [
        ("folder", "path", "required"),
        ("inner", "section", ""),
        ("steps", "list of sections", "[]"),
    ]
    (depth,) = sections["inner"].keys
    assert (depth.type, depth.default, depth.meaning) == ("integer, at least 1", "5", "How deep it lies.")
    assert sections["steps.trim"].heading == '[[steps]] with kind = "trim"'
    assert [key.type for key in sections["steps.grow"].keys] == ['`"grow"`', "list of numbers"]
    assert sections["steps.cut"].keys[1].type == "number, above 0, below 1"
    assert sections["steps.cut"].keys[1].default == "left out"


def test_a_registry_tells_forms_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipe_keys.RECIPES, "train", f"{__name__}:Forest")
    monkeypatch.setitem(recipe_keys.FORMS, "train", {"trees": f"{__name__}:forms"})
    assert [(each.name, each.heading) for each in recipe_sections("train")] == [
        ("", "before all sections"),
        ("trees.cut", '[[trees]] with kind = "cut"'),
        ("trees.leaf.decoder", '[[trees]] with kind = "leaf", of a decoder'),
        ("trees.leaf.moss", '[[trees]] with kind = "leaf", of moss'),
    ]
    assert len(find_sections("train", "trees.leaf")) == 2
    assert 'Written as `[[trees]]` with `kind = "leaf"`, of a decoder.' in as_markdown(recipe_sections("train"), {})


@pytest.mark.usefixtures("tree")
def test_one_section_or_all() -> None:
    assert [each.name for each in find_sections("train", "steps")] == ["steps.grow", "steps.cut", "steps.trim"]
    assert [each.name for each in find_sections("train", "[steps.cut]")] == ["steps.cut"]
    assert len(find_sections("train", None)) == 5
    with pytest.raises(ConfigError, match=r"no section 'inne'; did you mean 'inner'\? Their sections are inner, "):
        find_sections("train", "inne")


@pytest.mark.usefixtures("tree")
def test_as_text_and_as_a_page() -> None:
    text = as_text(find_sections("train", "steps.cut"))
    assert text.startswith('[[steps]] with kind = "cut"\n  A cut.\n\n  kind: "cut" or "trim" (required)\n')
    assert text.endswith("  share: number, above 0, below 1 (left out)\n      What | leaves.\n")
    markdown = as_markdown(recipe_sections("train"), {})
    assert "| `share` | number, above 0, below 1 | left out | What \\| leaves. |" in markdown
    assert "Its keys are those of `steps.cut`." in markdown
    assert 'Written as `[[steps]]` with `kind = "cut"`.' in markdown


def test_the_page_in_docs_is_current() -> None:
    """`make recipes-doc` writes it anew."""
    assert (ROOT / "docs/recipes.md").read_text() == page()


def test_the_page_is_written_by_the_module() -> None:
    result = forking.run([sys.executable, "-m", "penjing.core.recipe_keys"])
    assert result.returncode == 0, result.stderr
    assert result.stdout == page()
