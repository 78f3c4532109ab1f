"""The recipe's [data]: what is learnt from, and how a step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from penjing.core.config import Config


class DataConfig(Config):
    """`batch_size`: samples of one update over all processes; `micro_batch`: of one forward pass of one process.

    micro_batch: None takes batch_size / processes, "auto" times what fits into memory and takes the fastest.
    """

    batch_size: int = Field(gt=0)
    micro_batch: int | Literal["auto"] | None = None
    prefetch: int = Field(default=4, ge=1)

    @field_validator("micro_batch")
    @classmethod
    def _positive(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be 1 or more, or 'auto'")
        return value


class TextData(DataConfig):
    """Packed sequences of `sequence_length` tokens, from text `sources` (see data/corpora.py) or ready `shards`.

    document_mask: attention stays inside a document, whose positions count from 0; else a row is one context.
    """

    kind: Literal["text"]
    sources: tuple[str, ...] = ()
    shards: Path | None = None
    tokenizer: Path | None = None
    sequence_length: int = Field(gt=0)
    document_mask: bool = False
    held_out: float = Field(default=0.02, gt=0, lt=1)


class FashionData(DataConfig):
    """Fashion-MNIST with random crops after `pad`, flips, and erased squares."""

    kind: Literal["fashion-mnist"]
    pad: int = Field(default=0, ge=0)
    flip: bool = False
    erase: int = Field(default=0, ge=0)
