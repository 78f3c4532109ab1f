"""Questions about images that a decoder that sees is looked at with while it is compressed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from penjing.compress.samples.data import DataSettings, Samples, TokenData, token_samples
from penjing.compress.sight.rows import BATCH, read_rows
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.progress import Progress
from penjing.train.chat.sighted import SightedRows
from penjing.train.data.stream import one_pass
from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED, Batch


@dataclass(frozen=True)
class SightData:
    """Rows with images, and text for what looks at the decoder alone; the loss is that of the answers' tokens."""

    rows: SightedRows
    text: TokenData

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`: tokens, images, the places of logits and which images are seen, as `VisionLanguage` takes
        them."""
        for batch in self._batches():
            yield _arguments(batch)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`."""
        for batch in self._batches():
            targets = batch["targets"]
            yield cross_entropy_sum(model(*_arguments(batch)), targets, ignored=IGNORED) / (targets != IGNORED).sum()

    def _batches(self) -> Iterator[Batch]:
        return one_pass(self.rows, len(self.rows), micro_batch=BATCH, rank=0, world_size=1)


def _arguments(batch: Batch) -> tuple[Tensor, ...]:
    return batch["tokens"], batch["images"], batch["rows"], batch["seen"]


def seeing_samples(folder: Path, settings: DataSettings, progress: Progress) -> Samples:
    """The rows with images that `settings` name, in the tokens of the model in `folder`; without any, text.

    Raises:
        ConfigError, InputError: see `token_samples` and `read_rows`.
    """
    text = token_samples(folder, settings, progress)
    if not settings.rows:
        return text
    config = vision_language_config(folder)
    rows = read_rows(folder, config, settings.rows, settings.row_images, settings.most_rows, "data.rows", progress)
    return SightData(rows, text)
