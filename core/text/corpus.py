"""Text that every machine has, as tokens: CPython's help topics (prose) and its standard library (code), and the texts
of many kinds and languages that come along to calibrate with."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from penjing.core.errors import InputError
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.text.windows import text_room, text_windows

TOPIC_GAP = "\n\n"
DOMAINS = Path(__file__).with_name("domains.txt")
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")
CHARS_PER_TOKEN = 6  # more than a token of prose has, so that a text is seldom read twice
BESIDE_CUT = 256  # tokens; longer than any word, which is what tokens are joined within
CODE_PACKAGES = ("email", "json")  # 350 kB; `code_text` reads modules that lie in no package


def heldout_text() -> str:
    """Every second help topic: for evaluation only. About 230 kB."""
    return _topics(1)


@cache
def calibration_text() -> str:
    """The other help topics, for calibration, without the paragraphs that `heldout_text` has too. About 200 kB."""
    return TOPIC_GAP.join(_calibration_paragraphs(_topics(0)))


def domain_text() -> str:
    """Paragraphs of many kinds and languages, written for calibration: a neuron that only verse or German excites is
    else never seen, and its outliers cost INT8 five times as much there. About 8 kB."""
    return DOMAINS.read_text(encoding="utf-8")


def calibration_documents() -> Iterator[tuple[str, str]]:
    """(Name, text) of what a model may be trained on before it is evaluated on `heldout_text` and `code_text`: the
    help topics of `calibration_text` one by one, and modules of a few packages. About 550 kB."""
    from pydoc_data.topics import topics

    for name in sorted(topics)[::2]:
        if text := TOPIC_GAP.join(_calibration_paragraphs(topics[name])):
            yield f"prose/{name}", text
    for package in CODE_PACKAGES:
        for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
            if text := path.read_text(encoding="utf-8"):
                yield f"code/{package}/{path.stem}", text


def code_text(num_chars: int) -> str:
    """The first `num_chars` characters of the standard library's modules in alphabetical order.

    Raises:
        InputError: the library has less.
    """
    texts: list[str] = []
    missing = num_chars
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8")[:missing])
        missing -= len(texts[-1])
        if missing <= 0:
            return "".join(texts)
    raise InputError(f"the standard library's modules are {missing} characters short of {num_chars}; ask for fewer")


def heldout_tokens(tokenizer: Tokenizer, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` tokens of `heldout_text` as (num_tokens,) int64, without begin-of-text.

    Raises:
        InputError: the text has fewer tokens.
    """
    return _tokens(tokenizer, heldout_text(), num_tokens)


def first_windows(tokenizer: Tokenizer, text: str, num_tokens: int, window: int) -> torch.Tensor:
    """(num_tokens / window, window) int64: the first `text_windows` of `text`.

    Raises:
        InputError: the text has fewer tokens.
    """
    count = num_tokens // window
    tokens = _tokens(tokenizer, text, count * text_room(tokenizer, window))
    return text_windows(tokenizer, tokens.tolist(), window)


def calibration_windows(tokenizer: Tokenizer, num_tokens: int, window: int, code: float) -> torch.Tensor:
    """(num_tokens / window, window) int64: `text_windows` of `domain_text` and, behind it, `calibration_text`, then of
    code, a share `code` of all.

    Args:
        num_tokens: a multiple of `window`.
        code: of the windows, rounded to whole ones.

    Raises:
        InputError: a text has fewer tokens.
    """
    num_code = round(code * (num_tokens // window)) * window
    prose = domain_text() + TOPIC_GAP + calibration_text()
    parts = [first_windows(tokenizer, prose, num_tokens - num_code, window)]
    if num_code:
        source = "".join(text for name, text in calibration_documents() if name.startswith("code/"))
        parts.append(first_windows(tokenizer, source, num_code, window))
    return torch.cat(parts)


def _calibration_paragraphs(text: str) -> Iterator[str]:
    # CPython repeats whole sections in several topics: 15 % of the held-out lines were in both halves
    held = _heldout_paragraphs()
    return (paragraph for paragraph in text.split(TOPIC_GAP) if _normal(paragraph) not in held)


@cache
def _heldout_paragraphs() -> frozenset[str]:
    return frozenset(_normal(paragraph) for paragraph in heldout_text().split(TOPIC_GAP))


def _topics(remainder: int) -> str:
    from pydoc_data.topics import topics

    return TOPIC_GAP.join(topics[name] for index, name in enumerate(sorted(topics)) if index % 2 == remainder)


def _normal(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _tokens(tokenizer: Tokenizer, text: str, num_tokens: int) -> torch.Tensor:
    # Not all of 200 kB for a few windows: where a text is cut changes the tokens beside the cut alone.
    length = CHARS_PER_TOKEN * (num_tokens + BESIDE_CUT)
    while True:
        ids = tokenizer.encode(text[:length], allow_special=False, add_special=False)
        if length >= len(text) or len(ids) >= num_tokens + BESIDE_CUT:
            break
        length *= 2
    if len(ids) < num_tokens:
        raise InputError(f"the text has {len(ids)} tokens, {num_tokens} were asked for; ask for fewer")
    return torch.tensor(ids[:num_tokens], dtype=torch.int64)
