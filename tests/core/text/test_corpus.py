"""The texts for calibration and evaluation: disjoint, long enough, and tokenized as they stand."""

from pathlib import Path

import pytest
import torch

from penjing.core.errors import InputError
from penjing.core.text import corpus
from penjing.core.text.corpus import (
    calibration_documents,
    calibration_text,
    code_text,
    heldout_text,
    heldout_tokens,
)
from penjing.core.text.tokenizer import Tokenizer


def test_the_halves_share_no_topic() -> None:
    held, calibration = set(heldout_text().splitlines()), set(calibration_text().splitlines())
    shared = {line for line in held & calibration if len(line) > 60}
    assert len(shared) < 0.02 * len(held)  # a few formulas of the language's grammar occur in several topics
    assert min(len(heldout_text()), len(calibration_text())) > 100_000


def test_documents_for_training_hold_nothing_that_is_evaluated() -> None:
    documents = dict(calibration_documents())
    prose = "\n\n".join(text for name, text in documents.items() if name.startswith("prose/"))
    code = "".join(text for name, text in documents.items() if name.startswith("code/"))
    assert min(len(prose), len(code)) > 150_000
    held = {" ".join(paragraph.split()) for paragraph in heldout_text().split("\n\n")} - {""}
    assert not held & {" ".join(paragraph.split()) for paragraph in prose.split("\n\n")}
    evaluated = {line for line in code_text(1_000_000).splitlines() if len(line) > 60}
    shared = evaluated & {line for line in code.splitlines() if len(line) > 60}
    assert len(shared) < 0.005 * len(evaluated)  # a common import or comment


def test_tokens_begin_the_text(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_folder(smollm2)
    ids = heldout_tokens(tokenizer, 16_384)
    assert ids.shape == (16_384,)
    assert ids.dtype == torch.int64
    assert heldout_text().startswith(tokenizer.decode(ids[:1000].tolist()))
    with pytest.raises(InputError, match="1000000 were asked for"):
        heldout_tokens(tokenizer, 1_000_000)


@pytest.mark.parametrize("per_token", [1, 6])  # with 1 the first part of the text is too short
def test_tokens_of_a_part_are_those_of_the_whole(
    per_token: int, smollm2: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "CHARS_PER_TOKEN", per_token)
    for folder in (smollm2, tiny_checkpoint):
        tokenizer = Tokenizer.from_folder(folder)
        whole = tokenizer.encode(heldout_text(), allow_special=False, add_special=False)
        for count in (1, 64, 777, 1500, 4096, 20_000, len(whole)):
            assert heldout_tokens(tokenizer, count).tolist() == whole[:count]


def test_code_has_the_length_asked_for() -> None:
    text = code_text(100_000)
    assert len(text) == 100_000
    assert "def " in text
    with pytest.raises(InputError, match="short of"):
        code_text(1_000_000_000)
