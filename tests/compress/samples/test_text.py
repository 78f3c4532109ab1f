"""The windows that a decoder is calibrated on: of many kinds, the user's own among them, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penjing.compress.measure.perplexity import evaluation_windows, own_windows
from penjing.compress.samples.text import decoder_windows, spread
from penjing.core.errors import InputError
from penjing.core.text.corpus import code_text, domain_text, heldout_text
from penjing.core.text.tokenizer import Tokenizer
from tests.begun import with_ends


def test_smollm2_sees_conversations_many_kinds_of_text_and_code(smollm2: Path) -> None:
    windows = decoder_windows(smollm2, 6144, 512, 0.25)
    assert windows.shape == (12, 512)
    assert torch.equal(windows, decoder_windows(smollm2, 6144, 512, 0.25))
    tokenizer = Tokenizer.from_folder(smollm2)
    text = tokenizer.decode(windows.flatten().tolist(), skip_special=False)
    assert "<|im_start|>user" in text
    for kind in ("Wherefore givest thou", "Als der Regen", "春天来了", "SELECT c.name", "#include <stdio.h>"):
        assert kind in text
    assert text.count("import ") > 3
    assert len(tokenizer.encode(domain_text())) < 8 * 512  # so that all of it is seen


def test_no_paragraph_that_is_written_for_calibration_is_evaluated() -> None:
    evaluated = {" ".join(each.split()) for each in (heldout_text() + code_text(500_000)).split("\n\n")}
    assert not evaluated & {" ".join(each.split()) for each in domain_text().split("\n\n")}


def test_own_text_takes_its_share(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("zebra " * 2000)
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    windows = decoder_windows(tiny_checkpoint, 512, 64, 0.25, (path,), 0.25)
    assert windows.shape == (8, 64)
    assert ["zebra zebra" in tokenizer.decode(row.tolist()) for row in windows] == [True] * 2 + [False] * 6
    path.write_text("zebra")
    with pytest.raises(InputError, match=r"data\.calibrate has \d+ tokens, and a window has 64; give more text"):
        decoder_windows(tiny_checkpoint, 512, 64, 0.25, (path,), 0.25)


def test_own_text_alone_leaves_no_room_for_a_conversation(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("zebra " * 4000)
    windows = decoder_windows(tiny_checkpoint, 768, 64, 0.25, (path,), 1.0)
    assert windows.shape == (12, 64)
    assert all("zebra zebra" in Tokenizer.from_folder(tiny_checkpoint).decode(row.tolist()) for row in windows)


def test_windows_are_spread_over_the_text(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_checkpoint)
    assert spread(tokenizer, list(range(105)), 3, 10)[:, 0].tolist() == [0, 30, 60]
    assert len(spread(tokenizer, list(range(35)), 8, 10)) == 3


def test_every_window_begins_as_a_text_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Without what its tokenizer puts first, Gemma 3 was calibrated and judged on what it never sees: it guessed 2.3
    times worse, and INT8 diverged three to five times as much."""
    folder = with_ends(tiny_checkpoint, tmp_path / "begun", begins=True)
    path = tmp_path / "own.txt"
    path.write_text("zebra " * 2000)
    tokenizer = Tokenizer.from_folder(folder)
    found = [decoder_windows(folder, 1024, 64, 0.25, (path,), 0.25)]
    found += evaluation_windows(tokenizer, 256, 128, 64).values()
    found += own_windows(folder, {"own": path}, 256, 64).values()
    for windows, count in zip(found, (16, 4, 2, 4), strict=True):
        assert windows.shape == (count, 64)
        assert windows[:, 0].tolist() == list(tokenizer.begin) * count
