"""One value of a folder's JSON files is something else: the import works, or an error says what is wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penjing.core.errors import InputError, PenjingError
from penjing.core.imports.importer import import_model

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
ODD = [
    None, True, -1, 0, 2**31, 2**63, 10**20, -(10**20), 10**400, 1.5, float("nan"), float("inf"), "", "yes", "\x00",
    [], [None], ["a"] * 3, {}, {"a": 1}, {"type": "BPE"}, [[[]]],
]  # fmt: skip
Place = tuple[str | int, ...]
Import = Callable[[str, Place, Any], None]


def places(value: Any, prefix: Place = ()) -> Iterator[Place]:
    """Where a value stands, at most four entries of a list."""
    yield prefix
    inner = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, part in inner:
        if prefix != ("model", "vocab"):  # hundreds of tokens, all alike
            yield from places(part, (*prefix, key))


def damaged(value: Any, place: Place, odd: Any) -> Any:
    if not place:
        return odd
    changed: Any = value.copy()
    changed[place[0]] = damaged(value[place[0]], place[1:], odd)
    return changed


@pytest.fixture(scope="module")
def import_damaged(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Import:
    """Import the folder with one value changed."""
    folder, out = tmp_path_factory.mktemp("damaged") / "model", tmp_path_factory.mktemp("out") / "out"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "penjing.json").unlink()

    def run(name: str, place: Place, odd: Any) -> None:
        path = folder / name
        whole = path.read_text()
        path.write_text(json.dumps(damaged(json.loads(whole), place, odd)))
        try:
            import_model(str(folder), out)
        finally:
            path.write_text(whole)
            shutil.rmtree(out, ignore_errors=True)

    return run


def test_any_damaged_value_is_imported_or_refused(tiny_checkpoint: Path, import_damaged: Import) -> None:
    known = {name: list(places(json.loads((tiny_checkpoint / name).read_text()))) for name in FILES}
    where = st.sampled_from(FILES).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(known[name])))

    @settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(where, st.sampled_from(ODD))
    @example(("tokenizer.json", ("model", "continuing_subword_prefix")), "yes")
    def check(at: tuple[str, Place], odd: Any) -> None:
        with contextlib.suppress(PenjingError):
            import_damaged(*at, odd)

    check()


def test_a_tokenizer_that_makes_the_library_panic_is_refused(
    import_damaged: Import,
) -> None:
    """A panic in Rust is no `Exception` to Python."""
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer"):
        import_damaged("tokenizer.json", ("model", "continuing_subword_prefix"), "longer than any token")
