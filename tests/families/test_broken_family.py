"""A package that brings a family, and cannot be imported or has no table: an error that names it, and only where its
family is asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penjing.compress.steps.registry import step_forms
from penjing.core import family
from penjing.core.errors import InputError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package `broken_family`, which brings the family `broken`."""
    folder = tmp_path / "broken_family"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(family, "_packages", lambda: {"broken": "broken_family"})
    for name in [each for each in sys.modules if each.startswith("broken_family")]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import nothing_such", "ModuleNotFoundError: No module named 'nothing_such'"),
        ("raise RuntimeError('I am broken\\nand long')", "RuntimeError: I am broken"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("OTHER = 1", "has no FAMILY"),
    ],
)
def test_it_is_named_and_spares_other_families(package: Path, code: str, said: str) -> None:
    (package / "compress.py").write_text(code)
    with pytest.raises(InputError, match=r"broken_family\.compress") as caught:
        family.table_of("compress", "broken")
    assert said in str(caught.value)
    assert "'broken'" in str(caught.value)
    assert "broken" not in family.names_of("compress")
    assert "quantize.decoder" in step_forms()


def test_a_package_without_the_stage_has_no_part_in_it(package: Path) -> None:
    with pytest.raises(InputError, match="have no part in compress: there is no"):
        family.table_of("compress", "broken")
