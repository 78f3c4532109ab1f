"""Conversations about images: placeholders, images, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import decode_image
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.chat.rows import RowError, TooLongError, take_rows
from penjing.train.chat.sighted import SightedRows, SightTokens
from penjing.train.chat.tokens import ChatTokens
from penjing.train.data.stream import Draw
from penjing.train.families.vision_language import image_token
from penjing.train.objective.objective import IGNORED
from penjing.train.sources.decoders import FORMATS
from tests.train.sources.test_reader import photo

WORDS = ["[END]", "what", "is", "this", "a", "shoe", "bag", "?", "and"]
ROWS, IMAGE = 4, len(WORDS)
PIXELS = Pixels(height=8, width=8, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture
def tokens(tmp_path: Path) -> SightTokens:
    backend = Backend(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend, [0])
    assert image_token(tokenizer, "<image>") == IMAGE
    for name, seed in (("a.png", 1), ("b.png", 2)):
        (tmp_path / name).write_bytes(photo(seed))
    (tmp_path / "broken.png").write_bytes(photo(1)[:200])
    read = partial(decode_image, pixels=PIXELS, formats=FORMATS)
    return SightTokens(ChatTokens(tokenizer, None), "<image>", ROWS, read, tmp_path, 24)


def test_a_placeholder_becomes_the_rows_of_its_image(tokens: SightTokens) -> None:
    row = {"prompt": "<image> and <image> what is this ?", "completion": "a shoe", "images": ["a.png", "b.png"]}
    found = tokens.row(row)
    assert found.texts[0].ids.tolist() == [*[IMAGE] * 4, 8, *[IMAGE] * 4, 1, 2, 3, 7, 4, 5, 0]
    assert np.flatnonzero(found.texts[0].learnt).tolist() == [13, 14, 15]
    assert [picture().shape for picture in found.pictures] == [(8, 8, 3)] * 2


def test_grey_images_enter_a_network_of_three_channels(tokens: SightTokens) -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    drawn = tokens.questions([(lambda: grey, [("what ?", "bag")])])
    read = tokens.row({"prompt": "<image> what ?", "completion": "bag", "images": "b.png"})
    images = SightedRows([*drawn, read], 0, PIXELS).batch(Draw(np.arange(2), np.ones(2, np.bool_)))["images"].numpy()
    assert images.shape == (2, 3, 8, 8)
    np.testing.assert_allclose(images[0], np.broadcast_to(grey[:, :, 0] / 127.5 - 1, (3, 8, 8)), atol=1e-6)


def test_answers_are_what_a_batch_learns(tokens: SightTokens) -> None:
    one = tokens.row({"prompt": "<image> what is this ?", "completion": "a shoe", "images": ["a.png"]})
    two = tokens.row({"prompt": "<image> what ?", "completion": "bag", "images": "b.png"})
    batch = SightedRows([one, two], 0, PIXELS).batch(Draw(np.array([0, 1, 0]), np.array([True, True, False])))
    length = batch["tokens"].shape[1]
    assert batch["tokens"].shape == (3, 11)
    assert batch["rows"].tolist() == [7, 8, 9, length + 5, length + 6, 2 * length + 7, 2 * length + 8, 2 * length + 9]
    assert batch["targets"].tolist() == [4, 5, 0, 6, 0, IGNORED, IGNORED, IGNORED]
    assert batch["sample"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch["images"].shape == (3, 3, 8, 8)
    assert not batch["images"][0].equal(batch["images"][1])


def test_who_is_blind_sees_grey(tokens: SightTokens) -> None:
    row = tokens.row({"prompt": "<image> what ?", "completion": "bag", "images": ["a.png"]})
    images = SightedRows([row], 0, PIXELS, blind=True).batch(Draw(np.array([0]), np.array([True])))["images"]
    assert images.unique().numel() == 1


def test_questions_about_one_image_do_not_see_each_other(tokens: SightTokens) -> None:
    picture = tokens.row({"prompt": "<image>", "completion": "bag", "images": ["a.png"]}).pictures[0]
    (found,) = tokens.questions([(picture, [("what ?", "a bag"), ("is this ?", "shoe")])])
    assert [text.ids.tolist() for text in found.texts] == [
        [*[IMAGE] * 4, 1, 7, 4, 6, 0],
        [*[IMAGE] * 4, 2, 3, 7, 5, 0],
    ]
    assert [np.flatnonzero(text.learnt).tolist() for text in found.texts] == [[6, 7, 8], [7, 8]]


def test_an_image_is_in_a_batch_once_and_its_questions_are_chosen_by_chance(tokens: SightTokens) -> None:
    one, two = (
        tokens.row({"prompt": "<image>", "completion": "bag", "images": [name]}).pictures[0]
        for name in ("a.png", "b.png")
    )
    three = [("what ?", "bag"), ("is ?", "shoe"), ("this ?", "a")]
    some, other = tokens.questions([(one, three), (two, [("what ?", "shoe")])])
    both = tokens.row({"prompt": "<image> and <image> ?", "completion": "bag", "images": ["b.png", "a.png"]})
    rows = SightedRows([some, other, both], 0, PIXELS, most=2)
    real = np.ones(3, np.bool_)
    chosen = [rows.batch(Draw(np.arange(3), real, np.full(3, n, np.uint64))) for n in range(20)]
    assert all(batch["tokens"].shape[0] == 4 and batch["images"].shape[0] == 4 for batch in chosen)
    assert chosen[0]["seen"].tolist() == [0, 0, 1, 2, 3]
    assert len({tuple(batch["tokens"][:2].flatten().tolist()) for batch in chosen}) == 6
    judged = rows.batch(Draw(np.arange(3), real))
    assert judged["seen"].tolist() == [0, 0, 0, 1, 2, 3]
    padded = rows.batch(Draw(np.array([1, 0]), np.array([True, False]), np.zeros(2, np.uint64)))
    assert (padded["targets"][padded["sample"] > 0] == IGNORED).all()


def test_rows_about_one_image_are_held_out_together_and_one_question_about_others_is_not(tokens: SightTokens) -> None:
    def key(prompt: str, *names: str) -> bytes:
        return tokens.row({"prompt": prompt, "completion": "a shoe", "images": list(names)}).key

    assert key("<image> what ?", "a.png") == key("<image> is this ?", "a.png")
    assert key("<image> what ?", "a.png") != key("<image> what ?", "b.png")
    assert key("<image> <image>", "a.png", "b.png") != key("<image> <image>", "b.png", "a.png")


def test_questions_about_images_that_are_no_files_have_keys_of_their_own(tokens: SightTokens) -> None:
    picture = tokens.row({"prompt": "<image>", "completion": "bag", "images": ["a.png"]}).pictures[0]
    one, two = tokens.questions([(picture, [("what ?", "bag")]), (picture, [("is this ?", "bag")])])
    assert one.key != two.key
    whole = [
        replace(row, texts=tuple(replace(text, learnt=np.ones_like(text.learnt)) for text in row.texts))
        for row in (one, two)
    ]
    assert b"" != whole[0].key != whole[1].key


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"images": []}, r"it has 0 images, and <image> stands 1 time in"),
        ({"images": ["a.png", "b.png"]}, r"it has 2 images, and <image> stands 1 time in"),
        ({"prompt": "what ?"}, r"it has 1 image, and <image> stands 0 times"),
        ({"prompt": "what ?", "images": []}, "it has no image"),
        (
            {"images": ["none.png"]},
            r"cannot be read: .*none.png is no file; data.images = .* is the folder of",
        ),
        ({"images": ["broken.png"]}, "an image cannot be read: it is a broken image .*; encode it again$"),
        ({"images": ["../outside.png"]}, "an image cannot be read: ../outside.png lies outside"),
        ({"images": [7]}, "an image cannot be read: images holds no image but int"),
        ({"completion": ""}, "the completion is empty"),
    ],
)
def test_a_row_that_is_wrong_says_why(tokens: SightTokens, change: dict[str, Any], said: str) -> None:
    row = {"prompt": "<image> what ?", "completion": "bag", "images": ["a.png"]} | change
    with pytest.raises(RowError, match=said):
        tokens.row(row)


def test_what_is_too_long_is_counted(tokens: SightTokens) -> None:
    with pytest.raises(TooLongError):
        tokens.row({"prompt": "<image>" + " what" * 20, "completion": "bag", "images": ["a.png"]})


def test_bad_rows_of_a_file_are_named(tokens: SightTokens, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "<image> what ?", "completion": "bag", "images": ["broken.png"]}\n')
    with pytest.raises(InputError, match=r"1 of 1 rows are bad: .*rows.jsonl, line 1: an image cannot be read"):
        take_rows([str(path)], tokens.row, 0.01, Silent())
