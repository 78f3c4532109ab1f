"""The recipe's [data]: what is learnt from, and how a step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penjing.core.config import Config
from penjing.core.graph.config import FIT, RESIZE, Filter, Fit
from penjing.core.remote.files import is_remote
from penjing.train.data.chunks import ChunkConfig
from penjing.train.data.mixing import MixingConfig
from penjing.train.recipe.rows import RowConfig
from penjing.train.sources.settings import Augment, Mixed, TrainingSource


def _path_or_address(value: object) -> object:
    return Path(value) if isinstance(value, str) and not is_remote(value) else value  # a Path would lose a slash


class DataConfig(Config):
    """What every kind of data says."""

    batch_size: int = Field(gt=0, description="Samples of one update over all processes.")
    micro_batch: int | Literal["auto"] | None = Field(
        default=None,
        description='Samples of one forward pass of one process; by default batch_size / processes; "auto" times what '
        "fits into memory and takes the fastest.",
    )
    prefetch: int = Field(default=4, ge=1, description="Batches that are prepared ahead of the model.")

    @field_validator("micro_batch")
    @classmethod
    def _positive(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be 1 or more, or 'auto'")
        return value


class TextData(DataConfig):
    """Packed sequences of tokens, from text `sources` (see data/corpora.py) or ready `shards`."""

    kind: Literal["text"] = Field(description="Text as packed sequences of tokens.")
    sources: tuple[str, ...] = Field(
        default=(),
        description="Files and folders: text and JSON lines, also compressed, Parquet and Arrow, or a data set of "
        "Hugging Face or of `penjing curate`; also elsewhere, such as s3://bucket/corpus/ or https://host/a.jsonl.gz; "
        "'builtin:prose' or 'builtin:code'.",
    )
    column: str | None = Field(
        default=None,
        description='The field of JSON lines and tables that holds the text; by default "text", "content" or '
        '"messages" (conversations, which need a tokenizer with a chat template).',
    )
    most_damaged: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Documents that cannot be read are left out, counted and listed; a larger share of them stops.",
    )
    shards: Annotated[Path | str, BeforeValidator(_path_or_address)] | None = Field(
        default=None,
        description="A folder of ready token shards, in place of sources; also elsewhere, such as s3://bucket/shards: "
        "then blocks are read ahead and kept in the cache, and only samples of a few blocks are mixed with each other.",
    )
    tokenizer: Path | None = Field(
        default=None, description="A folder with a tokenizer.json; by default one is trained on the sources."
    )
    sequence_length: int = Field(gt=0, description="Tokens of a sequence.")
    document_mask: bool = Field(
        default=False,
        description="Attention stays inside a document, whose positions count from 0; else a row is one context.",
    )
    held_out: float = Field(
        default=0.02,
        gt=0,
        lt=1,
        description="Share of the text that is kept for evaluation, in whole clusters of near duplicates.",
    )
    chunks: ChunkConfig | None = Field(
        default=None, description="Windows that overlap, for long texts; by default rows follow each other."
    )
    mixing: MixingConfig | None = Field(
        default=None, description="Domains and their shares of each batch; by default all text is one."
    )


class RowData(DataConfig, RowConfig):
    """Rows that are cut to sequences."""

    sequence_length: int = Field(gt=1, description="Tokens of a sequence; longer rows are left out and counted.")


class ChatData(RowData):
    """Conversations (`messages`, with `tools`), or `prompt` and `completion`, of which the answers are learnt."""

    kind: Literal["chat"] = Field(description="Conversations, of which the assistant's turns are learnt.")
    learn: Literal["assistant", "last", "all"] = Field(
        default="assistant", description="Which turns are learnt: all of the assistant, its last one, or everything."
    )
    packing: bool = Field(default=True, description="Several conversations share a row, and none sees another.")

    @property
    def document_mask(self) -> bool:
        """Rows hold documents that do not see each other."""
        return True


class SightData(RowData):
    """Conversations about images, or `prompt` and `completion`, with `images`, of which the answers are learnt."""

    kind: Literal["image-chat"] = Field(description="Conversations about images, of which the answers are learnt.")
    sources: tuple[str, ...] = Field(
        min_length=1,
        description="Files .jsonl or .parquet, and folders of them, whose texts have <image> where each of `images` "
        "stands; or 'builtin:scenes', scenes of Fashion-MNIST with questions, and 'builtin:scenes-described', others "
        "that are told in reading order.",
    )
    held_out_sources: tuple[str, ...] = Field(
        default=(),
        description="Rows to evaluate on, such as 'builtin:scenes-test'; by default a share of `sources` is held out.",
    )
    images: Path = Field(default=Path(), description="The folder that paths of images are relative to, and stay in.")
    learn: Literal["assistant", "last", "all"] = Field(
        default="assistant", description="Which turns are learnt: all of the assistant, its last one, or everything."
    )
    questions: int | None = Field(
        default=None,
        ge=1,
        description="Of the questions of a builtin scene, so many are learnt at a time, which chance chooses; by "
        "default all. Each is a text of its own, and the image is computed once for all of them.",
    )
    blind: bool = Field(default=False, description="Images are replaced by grey, to see what is known without looking.")


class PreferenceData(RowData):
    """Pairs of answers, `chosen` and `rejected`, to a `prompt`; `margin` says how much better the chosen one is."""

    kind: Literal["preference"] = Field(description="Pairs of a better and a worse answer to one prompt.")


class RolloutData(DataConfig):
    """Answers that the model samples itself, to the prompts of [prompts]."""

    OTHERS: ClassVar[tuple[str, ...]] = ("top_p", "top_k", "min_p")

    kind: Literal["rollouts"] = Field(description="Answers that the model samples itself, to [prompts].")
    batch_size: int = Field(gt=0, description="Prompts of one update over all processes.")
    micro_batch: int | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
        default=None, description="Prompts of one forward pass of one process; by default batch_size / processes."
    )
    prefetch: Literal[0] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
        default=0, description="Nothing is prepared ahead, since answers are sampled by the newest weights."
    )
    samples: int = Field(default=8, ge=1, le=64, description="Answers to each prompt; of grpo and rloo 2 at least.")
    max_tokens: int = Field(ge=1, description="Tokens of an answer at most.")
    temperature: float = Field(
        default=1.0, gt=0, le=10, description="Logits are divided by it, when answers are sampled and when learnt."
    )
    servers: tuple[str, ...] = Field(
        default=(),
        description="host:port of the gRPC endpoints of servers that sample in place of this process: `penjing serve "
        "CHECKPOINT --set take_weights=true`, of the checkpoint that the run begins with. Each process of the run "
        "needs one of its own at least.",
    )
    ahead: bool = Field(
        default=False,
        description="Answers of the next update are sampled while this one is learnt, so by weights of one update "
        "before; what they were sampled with counts as the probability before. For a temperature of 1.",
    )

    @model_validator(mode="after")
    def _probabilities_are_told(self) -> RolloutData:
        if self.ahead and self.temperature != 1:
            raise ValueError(
                f"ahead needs the probabilities that answers were sampled with, which are told for a temperature of 1 "
                f"alone, not {self.temperature:g}; leave out one of the two"
            )
        if len(set(self.servers)) < len(self.servers):
            raise ValueError("servers names one twice; name each once")
        return self

    @model_validator(mode="before")
    @classmethod
    def _from_all_tokens(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in cls.OTHERS:
            if name in values:
                raise ValueError(
                    f"{name} would sample from a part of the tokens, whose probabilities are not those that are "
                    "learnt, so that their ratio means nothing; leave it out, or lower temperature"
                )
        return values


class SampleData(DataConfig, TrainingSource, Augment, Mixed):
    """Samples of the user."""

    kind: Literal["samples"] = Field(description="Your own samples: images by class, or what a graph takes.")
    height: int = Field(default=32, ge=1, le=1 << 14, description="Rows that a new classifier's images are scaled to.")
    width: int = Field(
        default=32, ge=1, le=1 << 14, description="Columns that a new classifier's images are scaled to."
    )
    channels: Literal[1, 3] = Field(default=3, description="Channels of a new classifier's images; 1: grey.")
    fit: Fit = Field(default="stretch", description=FIT + "the rest with grey. Of a new classifier, which keeps it.")
    resize: tuple[int, int] | None = Field(default=None, description=RESIZE + " Of a new classifier.")
    filter: Filter = Field(default="bilinear", description="How pixels between are found, of a new classifier.")
    most: int = Field(default=1_000_000, ge=1, description="So many images are read at most, of a classifier.")


class PairData(DataConfig, Augment):
    """Images with texts that belong to them."""

    kind: Literal["pairs"] = Field(description="Images, each with a text that belongs to it.")
    sources: tuple[str, ...] = Field(
        min_length=1,
        description="Tables (.jsonl, .parquet, .arrow) with an image and a text a row, .tar files as WebDataset writes "
        "them, folders of such or of images with a .txt each; or 'builtin:emoji-apple', '-google', '-twitter' and "
        "'-facebook'.",
    )
    held_out_sources: tuple[str, ...] = Field(
        default=(), description="Pairs to evaluate on; by default a share of `sources` is held out."
    )
    held_out: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the texts of `sources` that is held out, with all their images."
    )
    column: str | None = Field(default=None, description="Column of tables that holds the images; by default found.")
    text_column: str | None = Field(
        default=None, description='Column of tables that holds the texts; by default "text", "caption" or the like.'
    )
    height: int = Field(default=32, ge=1, le=1 << 14, description="Rows that images are scaled to.")
    width: int = Field(default=32, ge=1, le=1 << 14, description="Columns that images are scaled to.")
    channels: Literal[1, 3] = Field(default=3, description="Channels of images; 1: grey.")
    max_broken: float = Field(
        default=0.01, ge=0, le=1, description="Share of the pairs that may be unreadable; they are named and left out."
    )
    workers: int = Field(default=4, ge=1, le=256, description="Threads that read and decode.")


class FashionData(DataConfig, Augment, Mixed):
    """Fashion-MNIST with random crops, flips and erased squares."""

    kind: Literal["fashion-mnist"] = Field(description="The images of Fashion-MNIST.")
