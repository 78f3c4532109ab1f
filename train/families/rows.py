"""What tasks of a decoder share that learn from rows of a user's: what is held out, and the order of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.train.chat.held_out import held_out_places, judged_places
from penjing.train.data.stream import Indexed, Stream, one_pass, shuffled
from penjing.train.families.base import NOTHING_HELD_OUT
from penjing.train.families.decoder_task import DecoderTask
from penjing.train.objective.objective import Batch
from penjing.train.processes.world import World
from penjing.train.recipe.data import RowData

S = TypeVar("S", bound=Indexed)
D = TypeVar("D", bound=RowData)


class RowTask(DecoderTask, Generic[D, S]):
    """A decoder that learns from rows; a subclass reads them into `_learnt` and `_held`."""

    _data: D
    _learnt: S
    _held: S

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        return shuffled(
            self._learnt, batch_size=self._data.batch_size, micro_batch=micro_batch, rank=world.rank,
            world_size=world.size, seed=self._recipe.seed,
        )  # fmt: skip

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        return one_pass(self._held, micro_batch=micro_batch, rank=world.rank, world_size=world.size)

    def _held_places(self, keys: Sequence[bytes]) -> tuple[set[int], list[int]]:
        """The places of the rows that are not learnt, by their keys, and of those among them that are judged.

        Raises:
            ConfigError: nothing is left to learn, or to judge by.
        """
        evaluation = self._recipe.evaluation
        if evaluation.every and not self._data.held_out:
            raise ConfigError(NOTHING_HELD_OUT)
        held = held_out_places(keys, self._data.held_out if evaluation.every else 0.0)
        return held, judged_places(held, evaluation.samples)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return self._served_beside(folder) or self._asked(folder)


def ready_config(folder: Path, data: RowData) -> DecoderConfig:
    """The architecture of the checkpoint that learns from `data`.

    Raises:
        ConfigError: its context is shorter than a sequence.
        InputError: a damaged checkpoint.
    """
    config = open_checkpoint(folder).config
    if data.sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} is more than the {config.max_position_embeddings} tokens "
            f"that {folder} can see; lower it"
        )
    return config
