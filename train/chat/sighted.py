"""Conversations about images as tokens: a placeholder in a text becomes as many image tokens as an image has rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels
from penjing.core.images.normalise import normalise
from penjing.core.progress import plural
from penjing.core.vision.sight import image_text
from penjing.train.chat.held_out import prompt_key
from penjing.train.chat.rows import Row, RowError, TooLongError
from penjing.train.chat.tokens import ChatTokens, Masked
from penjing.train.data.stream import Draw
from penjing.train.objective.objective import IGNORED, Batch
from penjing.train.sources.tables import encoded_image

PLACEHOLDER = "<image>"
Picture = Callable[[], NDArray[np.uint8]]
"""An image (height, width, channels); grey ones may have one channel."""
_GREY = 128


@dataclass(frozen=True)
class Sighted:
    """Texts, none of which sees another, as tokens with those that are learnt; and the images whose rows stand in each
    of them, in their order.

    Attributes: files: a hash of the images' files, or nothing where they are no files.
    """

    texts: tuple[Masked, ...]
    pictures: tuple[Picture, ...]
    files: bytes = b""

    @property
    def key(self) -> bytes:
        """What rows about equal images share, whatever they ask; of images that are no files, rows that ask the
        same. All captions answer one question."""
        return self.files or prompt_key(self.texts)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(text.ids) for text in self.texts)


@dataclass(frozen=True)
class SightTokens:
    """Writes rows with images in the tokens of a model.

    Attributes: token: the image token, of which the tokenizer knows. rows: how many an image takes. read: what makes a
        picture of a file, or raises InputError. folder: where paths of images lie. longest: tokens of a row at most.
        setting: what names `folder` in the recipe.
    """

    writer: ChatTokens
    token: str
    rows: int
    read: Callable[[bytes], NDArray[np.uint8]]
    folder: Path
    longest: int
    setting: str = "data.images"

    @property
    def _text(self) -> str:
        return image_text(self.writer.tokenizer, self.token, self.rows)

    def row(self, row: Row) -> Sighted:
        """The tokens and images of a row with `images`, and `messages` or `prompt` and `completion`.

        Raises:
            RowError, RequestError: no image, other numbers of images and placeholders, an image that cannot be read,
                or what a conversation without images is refused for.
            TooLongError: it has more than `longest` tokens.
        """
        images = row.get("images", row.get("image"))
        images = images if isinstance(images, list) else [] if images is None else [images]
        placeholders, texts = self._expanded({name: value for name, value in row.items() if name != "images"})
        if placeholders != len(images):
            held, stand = plural(len(images), "image"), plural(placeholders, "time")
            raise RowError(f"it has {held}, and {PLACEHOLDER} stands {stand} in its texts")
        if not images:
            raise RowError("it has no image")
        text = self.writer.masked(texts)
        self._check(text, len(images))
        pictures, files = zip(*map(self._picture, images), strict=True)
        return Sighted((text,), pictures, b"".join(files))

    def questions(self, about: Iterable[tuple[Picture, Sequence[tuple[str, str]]]]) -> list[Sighted]:
        """Images, each with questions about it and their answers, which are learnt and ended. No question sees another:
        often an answer follows from those before it, and nobody would look at the image.

        Raises:
            TooLongError: see `row`.
        """
        known = dict[tuple[str, str], Masked]()  # scenes ask the same again and again

        def text(turn: tuple[str, str]) -> Masked:
            if turn not in known:
                known[turn] = self.writer.masked({"prompt": self._text + turn[0], "completion": turn[1]})
                self._check(known[turn], 1)
            return known[turn]

        return [Sighted(tuple(map(text, turns)), (picture,)) for picture, turns in about]

    def _check(self, text: Masked, images: int) -> None:
        if len(text.ids) > self.longest:
            raise TooLongError
        token = self.writer.tokenizer.token_to_id(self.token)
        if int((text.ids == token).sum()) != images * self.rows:
            raise RowError(f"its texts hold the token {self.token!r}, which stands for rows of images alone")

    def _expanded(self, value: Any) -> tuple[int, Any]:
        """(Placeholders, the value with image tokens in their place)."""
        if isinstance(value, str):
            return value.count(PLACEHOLDER), value.replace(PLACEHOLDER, self._text)
        if isinstance(value, dict):
            found = {name: self._expanded(each) for name, each in value.items()}
            return sum(count for count, _ in found.values()), {name: each for name, (_, each) in found.items()}
        if isinstance(value, list):
            some = [self._expanded(each) for each in value]
            return sum(count for count, _ in some), [each for _, each in some]
        return 0, value

    def _picture(self, value: Any) -> tuple[Picture, bytes]:
        """An image, and a hash of its file."""
        encoded = b""
        try:
            encoded = encoded_image(value, self.folder, "images")
            image = self.read(encoded)
        except InputError as error:
            where = "" if encoded else f"; {self.setting} = {self.folder} is the folder of images that rows name"
            raise RowError(f"an image cannot be read: {error}{where}") from None
        return lambda: image, hashlib.sha256(encoded).digest()


@dataclass(frozen=True)
class SightedRows:
    """Rows as `Indexed`: see `Answers` for what a batch has. An image is in it once, whatever number of texts it is in.

    Attributes: pad: the token that fills a text up. pixels: how images enter the network. blind: images are grey. most:
        so many texts of a row are taken to learn from, at random; to evaluate on, all.
    """

    rows: Sequence[Sighted]
    pad: int
    pixels: Pixels
    blind: bool = False
    most: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        chosen = [self.rows[place] for place in draw.samples]
        texts, real, seen, first = list[Masked](), list[np.bool_](), list[int](), 0
        for place, each in enumerate(chosen):
            taken = self._taken(each, None if draw.random is None else int(draw.random[place]))
            texts += taken
            real += [draw.real[place]] * len(taken)
            seen += [*range(first, first := first + len(each.pictures))] * len(taken)
        length = max(len(text.ids) for text in texts)
        tokens = np.full((len(texts), length), self.pad, np.int64)
        places, targets, samples = [], [], []
        for sample, text in enumerate(texts):
            ids, learnt = text.ids, text.learnt
            tokens[sample, : len(ids)] = ids
            found = np.flatnonzero(learnt[1:])
            places.append(sample * length + found)
            targets.append(np.where(real[sample], ids[1:][found], IGNORED))
            samples.append(np.full(len(found), sample))
        named = {"tokens": tokens, "seen": np.array(seen), "rows": places, "targets": targets, "sample": samples}
        batch = {
            name: torch.from_numpy((np.concatenate(each) if isinstance(each, list) else each).astype(np.int64))
            for name, each in named.items()
        }
        return batch | {"images": torch.from_numpy(self._images(chosen))}

    def _taken(self, row: Sighted, random: int | None) -> Sequence[Masked]:
        if random is None or self.most is None or self.most >= len(row.texts):
            return row.texts
        places = np.random.default_rng(random).permutation(len(row.texts))[: self.most]
        return [row.texts[place] for place in places]

    def _images(self, chosen: Sequence[Sighted]) -> NDArray[np.float32]:
        mean, std = (np.array(each, np.float32) for each in (self.pixels.mean, self.pixels.std))
        pictures = [picture() for each in chosen for picture in each.pictures]
        same = [np.broadcast_to(each, (*each.shape[:2], len(mean))) for each in pictures]  # grey: all channels alike
        images = np.stack(same).transpose(0, 3, 1, 2)
        if self.blind:
            images = np.full_like(images, _GREY)
        return np.ascontiguousarray(normalise(images, mean, std))
