"""Stop strings: the same cut however the text is divided, and nothing of a stop string is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.engine.stop import StopStrings

ALPHABET = "abé🌳"
pieces = st.lists(st.text(ALPHABET, max_size=4), max_size=12)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3).map(tuple)


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, bool]:
    """The definition: read character by character until one stop string ends; the longest of those that do."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end if include else end - max(map(len, met))], True
    return text, False


@given(pieces, stops, st.booleans())
def test_division_into_pieces_does_not_matter(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    expected, expected_stop = cut("".join(pieces), stops, include)
    matcher, shown, stopped = StopStrings(stops, include), "", False
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        assert expected.startswith(shown), "shown text is never taken back"
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == (expected, expected_stop)


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopStrings(("\n\nUser:",))
    assert matcher.push("done.\n") == ("done.", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("ing") == ("\n\nUsing", False)
    assert matcher.push("\n\nUser") == ("", False)
    assert matcher.push(": x") == ("", True)


@pytest.mark.parametrize("stop", ["🌳", "é"])
def test_a_stop_string_of_several_bytes(stop: str) -> None:
    assert StopStrings((stop,)).push(f"tall {stop} tree") == ("tall ", True)
