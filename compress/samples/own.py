"""Texts that a decoder writes itself, for calibration and for healing: the nearest to what it was trained on where that
is not at hand.

Every second one begins with a token drawn from the whole vocabulary (LLM-QAT, https://arxiv.org/abs/2305.17888), the
others are a question that the model asks itself behind the beginning of its own chat template, and its answer (Magpie,
https://arxiv.org/abs/2406.08464). Tokens are drawn by the model's own probabilities in the engine that serves it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from penjing.core.cache import cache_dir
from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.config import Config, key_of
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text, writing
from penjing.core.manifest import identity
from penjing.core.progress import Progress
from penjing.train.align.sampler import EngineSampler

OWN = "builtin:own"
WRITER = "data.own_texts.writer"
TOGETHER = 128  # samples of one file, which are written when all are complete; half of them are drawn at once
QUESTION = 64  # tokens of a question at most
_LAYOUT = 2  # raise it when other texts are written, so that those in the cache are not taken
_PLACE = "wherever"  # a question, to see what a template writes before it


class OwnTexts(Config):
    """`[data.own_texts]`: how many texts of its own a decoder writes where "builtin:own" is named."""

    samples: int = Field(default=64, ge=1, description="How many texts; every second one is a question and an answer.")
    tokens: int = Field(default=192, ge=16, description="Tokens of a text, and of an answer, at most.")
    temperature: float = Field(default=1.0, gt=0, le=2, description="1 draws tokens by the model's own probabilities.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of what is drawn.")
    writer: Path | None = Field(
        default=None,
        description="Another decoder that writes them, such as an INT8 artifact of the network, which is faster; none "
        "given: the network itself, or its teacher.",
    )


def own_texts(folder: Path, settings: OwnTexts, progress: Progress) -> Path:
    """A folder of .jsonl files in the cache, with what the decoder in `folder`, or the settings' writer, writes; made
    where it is not complete.

    A text depends on the model, the settings and its number alone. A run that is killed goes on with the next file.

    Raises:
        InputError: the writer is damaged or no decoder, or it writes nothing.
        SetupError: disk full, no permission.
    """
    folder = settings.writer or folder
    drawn = settings.model_dump(mode="json", exclude={"writer"})
    key = key_of(identity(folder), drawn, TOGETHER, version("penjing"), _LAYOUT)
    out = cache_dir() / "own-texts" / key[:16]
    files = [(first, out / f"texts-{first:06d}.jsonl") for first in range(0, settings.samples, TOGETHER)]
    missing = [(first, path) for first, path in files if not path.exists()]
    if not missing:
        return out
    progress.start(f"texts that {folder.name} writes", len(files))
    progress.advance(len(files) - len(missing))
    writer = _Writer(load_model(folder), settings)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for first, path in missing:
            lines = writer.lines(range(first, min(first + TOGETHER, settings.samples)))
            atomic_write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
            progress.advance()
    if not any(path.stat().st_size for _, path in files):
        raise InputError(f"{folder} writes nothing: each of its {settings.samples} texts is empty; name other text")
    return out


class _Writer:
    """A model that writes in its engine.

    Raises:
        InputError: a chat template that does not write what the user says.
    """

    def __init__(self, loaded: LoadedModel, settings: OwnTexts) -> None:
        self._tokenizer, self._template, self._settings = loaded.tokenizer, loaded.chat_template, settings
        self._begin = self._before_question() if loaded.chat_template is not None else [0]
        self._before = list(self._tokenizer.begin)
        # The template writes before the question and before the answer, and bytes that are no text are read as three.
        wanted = 2 * len(self._begin) + 4 * QUESTION + settings.tokens
        self._longest = min(loaded.config.max_position_embeddings, wanted)
        self._sampler = EngineSampler(loaded, self._longest)

    def lines(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The texts `numbers` as objects with `text` or `messages`; what is empty is left out."""
        talks = [number for number in numbers if number % 2 and self._template is not None]
        found = self._texts([number for number in numbers if number not in talks]) | self._conversations(talks)
        return [found[number] for number in sorted(found)]

    def _texts(self, numbers: list[int]) -> dict[int, dict[str, Any]]:
        firsts = {number: self._first_token(number) for number in numbers}
        prompts = {number: [*self._before, first] for number, first in firsts.items()}
        rest = self._draw(prompts, 0, self._settings.tokens)
        texts = {number: self._read([first, *rest[number]]) for number, first in firsts.items()}
        return {number: {"text": text} for number, text in texts.items() if text.strip()}

    def _conversations(self, numbers: list[int]) -> dict[int, dict[str, Any]]:
        template = self._template
        if not numbers or template is None:
            return {}
        drawn = self._draw(dict.fromkeys(numbers, self._begin), 1, QUESTION)
        said = {number: self._read(tokens).strip() for number, tokens in drawn.items()}
        asked = {number: [{"role": "user", "content": text}] for number, text in said.items() if text}
        prompts = {
            number: self._tokenizer.encode(template.render(messages), add_special=False)
            for number, messages in asked.items()
        }
        drawn = self._draw(prompts, 2, self._settings.tokens)
        replies = {number: self._read(tokens).strip() for number, tokens in drawn.items()}
        return {
            number: {"messages": [*asked[number], {"role": "assistant", "content": reply}]}
            for number, reply in replies.items()
            if reply
        }

    def _draw(self, prompts: dict[int, list[int]], turn: int, most: int) -> dict[int, list[int]]:
        """Tokens behind each prompt, by the seed of its number and of the turn; what leaves no room gets none."""
        room = {number: min(most, self._longest - len(prompt)) for number, prompt in prompts.items()}
        found: dict[int, list[int]] = {number: [] for number in prompts}
        for size in sorted({size for size in room.values() if size > 0}):
            numbers = [number for number in prompts if room[number] == size]
            seeds = [self._seed(number, turn) for number in numbers]
            answers = self._sampler.sample(
                [prompts[number] for number in numbers], seeds, 1, size, self._settings.temperature
            )
            found |= {number: answer[0].tokens for number, answer in zip(numbers, answers, strict=True)}
        return found

    def _read(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens).replace("\0", "")  # which no reader of texts takes

    def _seed(self, number: int, turn: int) -> int:
        return int(np.random.SeedSequence([self._settings.seed, number, turn]).generate_state(1)[0])

    def _first_token(self, number: int) -> int:
        special, size = self._tokenizer.special_ids, self._tokenizer.vocab_size
        known = [token for token in range(size) if token not in special and self._tokenizer.id_to_token(token)]
        return known[self._seed(number, 3) % len(known)]

    def _before_question(self) -> list[int]:
        """What the template writes before a question."""
        assert self._template is not None
        text = self._template.render([{"role": "user", "content": _PLACE}], add_generation_prompt=False)
        before, found, _ = text.partition(_PLACE)
        if not found:
            raise InputError("the chat template does not write what the user says; correct or remove it")
        return self._tokenizer.encode(before, add_special=False)
