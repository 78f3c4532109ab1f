"""The task of teaching a decoder to answer, from conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penjing.core.errors import ConfigError
from penjing.core.progress import Progress, plural
from penjing.train.chat.held_out import prompt_key
from penjing.train.chat.packed import PackedRows, pack_rows
from penjing.train.chat.rows import Row, TooLongError, take_rows
from penjing.train.chat.tokens import ChatTokens, Masked
from penjing.train.families.rows import RowTask, ready_config
from penjing.train.objective.objective import Batch
from penjing.train.recipe.data import ChatData
from penjing.train.recipe.recipe import RunRecipe


class ChatTuning(RowTask[ChatData, PackedRows]):
    """The decoder in `folder` on packed conversations, of which it learns the answers."""

    def __init__(self, folder: Path, recipe: RunRecipe, data: ChatData, progress: Progress) -> None:
        config = ready_config(folder, data)
        if recipe.compile:
            raise ConfigError(
                "compile = true is not for data.kind = 'chat': every row has conversations of other lengths, and a "
                "compiled model would be compiled again for each; set it to false"
            )
        self._writer = ChatTokens.from_folder(folder, data.template, data.learn)
        template = None if data.template is None or self._writer.template is None else self._writer.template.text
        super().__init__(recipe, config, folder, progress, template)
        self._data = data

        def take(row: Row) -> Masked:
            found = self._writer.masked(row)
            if len(found.ids) > data.sequence_length:
                raise TooLongError
            return found

        texts, _ = take_rows(data.sources, take, data.most_damaged, progress)
        keys = [prompt_key([text]) for text in texts]
        held, judged = self._held_places(keys)
        self._learnt = self._packed([text for place, text in enumerate(texts) if place not in held])
        self._held = self._packed([texts[place] for place in judged])
        counted = sum(int(text.learnt[1:].sum()) for text in self._learnt.texts)
        total = sum(len(text.ids) for text in self._learnt.texts)
        progress.note(
            f"{plural(len(self._learnt.texts), 'conversation')} in {plural(len(self._learnt.rows), 'row')} of "
            f"{data.sequence_length} tokens, {total / (len(self._learnt.rows) * data.sequence_length):.0%} full; "
            f"{counted:,} of {total:,} tokens are learnt"
        )

    def _packed(self, texts: Sequence[Masked]) -> PackedRows:
        pad = self.config.pad_token_id
        pad = next(iter(self._writer.tokenizer.eos_token_ids), 0) if pad is None else pad
        return pack_rows(texts, self._data.sequence_length, pad, together=self._data.packing)

    def prompt(self, text: str) -> Sequence[int]:
        """See `DecoderTask`: a turn of the user."""
        return self._writer.prompt({"prompt": text})

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        batch = self._learnt.read([0] * micro_batch)
        batch.pop("documents")  # whole rows are the upper bound of time and memory
        return batch
