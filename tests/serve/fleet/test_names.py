"""What several models of one command are called, and which share of the requests each version gets."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penjing.core.errors import ConfigError
from penjing.serve.fleet.names import adapter_settings, are_named, changed_shares, read_names


def test_names_and_versions() -> None:
    models = read_names(["llm:1=build/a", "llm:2=build/b", "embed-1.5=x=y"], ["llm:2=0.1"])
    assert [model.id for model in models] == ["llm:1", "llm:2", "embed-1.5"]
    assert [model.name for model in models] == ["llm", "llm", "embed-1.5"]
    assert [model.version for model in models] == [1, 2, None]
    assert [model.share for model in models] == [0.9, 0.1, 1.0]
    assert models[2].folder == Path("x=y")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([], [1.0, 0.0, 0.0]),
        (["m:1=0.2"], [0.2, 0.8, 0.0]),
        (["m:2=0.25", "m:3=0.25"], [0.5, 0.25, 0.25]),
        (["m:1=0", "m:2=0.5", "m:3=0.5"], [0.0, 0.5, 0.5]),
    ],
)
def test_the_first_version_without_a_share_gets_the_rest(shares: list[str], expected: list[float]) -> None:
    assert [model.share for model in read_names(["m:1=a", "m:2=b", "m:3=c"], shares)] == expected


@pytest.mark.parametrize(
    ("arguments", "shares", "message"),
    [
        (["a=x", "y"], [], "'y' has no name"),
        (["a=", "b=x"], [], "'a=' has no name"),
        (["a b=x"], [], "'a b' cannot be a model's name"),
        (["../a=x"], [], "cannot be a model's name"),
        (["a:0=x"], [], "cannot be a model's name"),
        (["a=x", "a=y"], [], "two models are called a"),
        (["a:1=x", "a:1=y"], [], "two models are called a:1"),
        (["a=x", "a:1=y"], [], "a has versions and a folder without one"),
        (["a=x", "b=y"], ["a=0.1"], "no model has any"),
        (["a:1=x", "a:2=y"], ["a:3=0.1"], "those are a:1, a:2"),
        (["a:1=x", "a:2=y"], ["a:2=much"], "'much' is no number"),
        (["a:1=x", "a:2=y"], ["a:2=1.1"], "between 0 and 1"),
        (["a:1=x", "a:2=y"], ["a:2=nan"], "between 0 and 1"),
        (["a:1=x", "a:2=y"], ["a:1=0.6", "a:2=0.6"], "are 1.2 in all; make them 1"),
        (["a:1=x", "a:2=y"], ["a:1=0.4", "a:2=0.4"], "are 0.8 in all; make them 1"),
        (["a:1=x", "a:2=y"], ["a:1=0.5", "a:2=0.4999999"], "are 0.9999999 in all"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], shares: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_names(arguments, shares)


def test_a_changed_share_leaves_the_others_their_proportions() -> None:
    shares = {"m:1": 0.6, "m:2": 0.3, "m:3": 0.1}
    assert changed_shares(shares, {"m:3": 0.4}) == pytest.approx({"m:1": 0.4, "m:2": 0.2, "m:3": 0.4})
    assert changed_shares(shares, {"m:2": 1.0}) == {"m:1": 0.0, "m:2": 1.0, "m:3": 0.0}
    assert changed_shares({"m:1": 0.0, "m:2": 1.0}, {"m:2": 0.25}) == {"m:1": 0.75, "m:2": 0.25}
    for given, message in (
        ({"m:4": 0.1}, "'m:4' is no version"),
        ({"m:1": 1.5}, "between 0 and 1"),
        ({"m:1": math.nan}, "between 0 and 1"),
        ({"m:1": 0.6, "m:2": 0.6}, "are 1.2 in all"),
        ({"m:1": 0.1, "m:2": 0.1, "m:3": 0.1}, "are 0.3 in all"),
    ):
        with pytest.raises(ConfigError, match=message):
            changed_shares(shares, given)


def test_a_single_folder_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "lr=0.1").mkdir()
    assert not are_named(["build/a"])
    assert not are_named([str(tmp_path / "lr=0.1")])
    assert are_named(["llm=build/a"])
    assert are_named(["build/a", "build/b"])


def test_adapters() -> None:
    assert adapter_settings(["alice=/a b", "bob=/c=d"], named=False) == ['adapters.alice="/a b"', 'adapters.bob="/c=d"']
    assert adapter_settings(["llm:alice=/a"], named=True) == ['llm.adapters.alice="/a"']
    assert adapter_settings(["llm:2:alice=/a"], named=True) == ['llm:2.adapters.alice="/a"']
    assert adapter_settings(["alice=/\U0001f333"], named=False) == ['adapters.alice="/\U0001f333"']
    assert adapter_settings(["alice=a"], named=False) == [f'adapters.alice="{Path.cwd()}/a"']


@pytest.mark.parametrize(
    ("texts", "named", "says"),
    [
        (["alice"], False, "NAME=FOLDER"),
        (["alice="], False, "NAME=FOLDER"),
        (["llm:alice=/a"], False, "NAME=FOLDER"),
        (["alice=/a"], True, "MODEL:NAME=FOLDER"),
        (["llm:2=/a"], True, "numbers are versions"),
        (["a.b=/a"], False, "cannot be an adapter's name"),
        (["=/a"], False, "cannot be an adapter's name"),
        (["a=/a", "a=/b"], False, "given twice"),
    ],
)
def test_adapters_of_another_form(texts: list[str], named: bool, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        adapter_settings(texts, named=named)
