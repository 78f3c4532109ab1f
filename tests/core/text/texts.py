"""Texts that tokenizers get wrong: a hypothesis strategy, and real prose and code."""

from __future__ import annotations

from hypothesis import strategies as st

from penjing.core.text.corpus import code_text, heldout_text

# fmt: off
FRAGMENTS = [
    "the", " the", "The", "I'll", "can't", "WE'RE", "'s", "x_1", "self.", "def f(x):", "return", "==", "!=", "->",
    "\n", "\n\n", "\r\n", "\t", "    ", " ", "  ", "\u00a0", "\u3000", "\u2028", "0", "1", "12", "2024", "3.14",
    "½", "²", "٣", "é", "e\u0301", "ß", "İ", "ǅ", "ﬁ", "Ω", "日本", "語", "한국", "안녕", "ไทย", "עברית", "العربية",
    "हिन्दी", "👍", "👍🏽", "👨\u200d👩\u200d👧", "🇩🇪", "\u200d", "\ufeff", "\x00", "\x7f", "\ufffd", "\U000e0001",
    "Ġ", "Ċ", "▁", "<0x41>", "://",
]
# fmt: on


def texts(special: list[str]) -> st.SearchStrategy[str]:
    """Any text, pieces that are hard to split, and control tokens, in any mixture."""
    letters = st.text(max_size=8)
    pieces = st.sampled_from(FRAGMENTS + special) | letters | st.sampled_from([" ", "\n"]).map(lambda gap: gap * 3)
    return st.lists(pieces, max_size=12).map("".join)


def real_texts() -> list[str]:
    """Help topics and standard library code, in pieces of some kilobytes."""
    whole = [heldout_text()[:60_000], code_text(60_000)]
    return [text[start : start + 5000] for text in whole for start in range(0, len(text), 5000)]
