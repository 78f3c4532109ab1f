"""The task of training a decoder on packed text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import Tokenizer, read_backend
from penjing.train.data.chunks import ChunkConfig, ChunkRows, cut, seams
from penjing.train.data.mixing import Mixing
from penjing.train.data.mixture import MixtureOrder, domain_shards, mixed
from penjing.train.data.pack import prepare_tokens
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.shards import TokenShards, read_index
from penjing.train.data.stream import OrderedStream, Stream, TokenSamples, one_pass, shuffled
from penjing.train.data.tokens import TokenRows, held_out_rows, text_of_row
from penjing.train.families.base import Family, Task
from penjing.train.families.chat import ChatTuning
from penjing.train.families.decoder_task import DecoderTask
from penjing.train.families.draft import DraftTuning
from penjing.train.families.preference import preference_task
from penjing.train.families.rollouts import RolloutTuning
from penjing.train.objective.objective import Batch
from penjing.train.processes.world import World
from penjing.train.recipe.data import ChatData, PreferenceData, RolloutData, TextData
from penjing.train.recipe.model import DecoderModel
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe
from penjing.train.remote.shards import RemoteShards, local_folder, open_shards, read_ahead
from penjing.train.state.initial import Weights, decoder_weights


class LanguageModeling(DecoderTask):
    """A decoder on packed text, in rows or in the windows of `data.chunks`.

    Args:
        model: a recipe's section, whose end of text is the tokenizer's; or the config of a ready model, whose weights
            are those of `recipe.initial` and whose tokenizer lies there, unless `data` names another: both go on into
            what is exported.
    """

    def __init__(
        self, recipe: RunRecipe, model: DecoderModel | DecoderConfig, data: TextData, progress: Progress
    ) -> None:
        self._model = model
        self._data = data
        self._read: dict[str, TokenSamples] = {}
        self._opened: dict[str, TokenShards] = {}
        if data.sequence_length > model.max_position_embeddings:
            raise ConfigError(
                f"data.sequence_length={data.sequence_length} is more than model.max_position_embeddings="
                f"{model.max_position_embeddings}; raise that"
            )
        tokenizer = data.tokenizer or _initial_tokenizer(recipe, model)
        if isinstance(data.shards, str) and (data.chunks or data.mixing):
            raise ConfigError(
                f"data.shards = {data.shards} is remote; data.chunks and data.mixing need shards on a disk of this "
                "machine: copy them, or leave these out"
            )
        if data.shards is None:
            self.folder = self._prepare(data, tokenizer, progress)
        else:
            self.folder = local_folder(data.shards) if isinstance(data.shards, str) else data.shards
        index = read_index(self.folder)
        if data.shards is not None and tokenizer is not None:
            _check_tokenizer(self.folder, tokenizer)
        if index.vocab_size > model.vocab_size:
            raise ConfigError(
                f"the shards in {self.folder} have a vocabulary of {index.vocab_size}, model.vocab_size is "
                f"{model.vocab_size}; "
                f"set model.vocab_size = {index.vocab_size} or more, or make shards with a smaller tokenizer"
            )
        super().__init__(recipe, _decoder_config(model, index.end_of_text), tokenizer or self.folder, progress)
        if data.document_mask and recipe.compile:
            raise ConfigError(
                "data.document_mask and compile exclude each other: every batch has documents of other lengths, and a "
                "compiled model would be compiled again for each; set one of them to false"
            )
        if recipe.evaluation.every:
            next(self.held_out(1, World()))  # text too short to evaluate on is refused before the run

    def _prepare(self, data: TextData, tokenizer: Path | None, progress: Progress) -> Path:
        if not data.sources:
            raise ConfigError("data needs sources (for example ['builtin:prose']) or shards")
        return prepare_tokens(
            data.sources,
            self._model.vocab_size,
            held_out=data.held_out,
            column=data.column,
            most_damaged=data.most_damaged,
            by_domain=data.mixing is not None,
            tokenizer=tokenizer,
            progress=progress,
        )

    def weights(self) -> Weights:
        """See `Task`."""
        if isinstance(self._model, DecoderModel) and self._recipe.initial is None:
            return decoder_weights(self._model.init_std, self.config.num_hidden_layers, self._recipe.seed)
        return super().weights()

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        batch = next(iter(self.stream(micro_batch, World(size=self._data.batch_size // micro_batch))))
        batch.pop("documents", None)  # whole rows are the upper bound of time and memory
        return batch

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        rows, shards = self._rows("train"), self._opened.get("train")
        share = {"micro_batch": micro_batch, "rank": world.rank, "world_size": world.size, "seed": self._recipe.seed}
        if isinstance(shards, RemoteShards):
            stride = text_of_row(shards.index, self._data.sequence_length)
            return read_ahead(rows, shards, stride, batch_size=self._data.batch_size, **share)
        return shuffled(rows, batch_size=self._data.batch_size, **share)

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        rows, most = self._rows("held_out"), self._recipe.evaluation.samples
        return one_pass(rows, most, micro_batch=micro_batch, rank=world.rank, world_size=world.size, spread=True)

    def _rows(self, split: str) -> TokenSamples:
        """The samples of a split: rows that follow each other, or windows that overlap."""
        if split not in self._read:
            data, shards = self._data, open_shards(self.folder, split)
            self._opened[split] = shards
            rows_of = TokenRows if split == "train" else held_out_rows
            self._read[split] = (
                rows_of(shards, data.sequence_length, data.document_mask)
                if data.chunks is None
                else self._windows(shards, data.chunks)
            )
        return self._read[split]

    def _windows(self, shards: TokenShards, config: ChunkConfig) -> ChunkRows:
        places = None
        if config.boundary == "hybrid":
            index = shards.index
            places = seams(Tokenizer.from_folder(self.folder), index.vocab_size, index.end_of_text)
        length = self._data.sequence_length
        chunks = cut(shards, text_of_row(shards.index, length), config.overlap, places)
        return ChunkRows(shards, chunks, length, self._data.document_mask)


class MixedLanguageModeling(LanguageModeling):
    """A decoder on packed text of several domains, in shares that `data.mixing` says; a `MixedTask`."""

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        shards = domain_shards(self.folder, "train")
        length = self._data.sequence_length
        sizes = {name: (each.num_tokens - 1) // text_of_row(each.index, length) for name, each in shards.items()}
        assert self._data.mixing is not None
        return mixed(
            shards,
            Mixing(self._data.mixing, sizes),
            length,
            batch_size=self._data.batch_size,
            micro_batch=micro_batch,
            rank=world.rank,
            world_size=world.size,
            seed=self._recipe.seed,
            steps=self._recipe.num_steps(sum(sizes.values())),
            document_mask=self._data.document_mask,
        )

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        for batches in self.held_out_parts(micro_batch, world).values():
            yield from batches()

    def held_out_parts(self, micro_batch: int, world: World) -> Mapping[str, Callable[[], Iterator[Batch]]]:
        """See `MixedTask`: each domain gives as many samples."""
        shards, trained = domain_shards(self.folder, "held_out"), domain_shards(self.folder, "train")
        if missing := [name for name in trained if name not in shards]:
            raise ConfigError(
                f"data.mixing: domains {', '.join(missing)} have no held-out text; give them more, or raise "
                "data.held_out"
            )
        if untrained := [name for name in shards if name not in trained]:
            raise ConfigError(
                f"data.mixing: domains {', '.join(untrained)} are held out as a whole, with nothing to train on; give "
                "them more text, or leave them out"
            )
        each = max(1, self._recipe.evaluation.samples // len(shards))
        share = {"micro_batch": micro_batch, "rank": world.rank, "world_size": world.size}
        length, mask = self._data.sequence_length, self._data.document_mask
        return {
            name: partial(one_pass, held_out_rows(tokens, length, mask), each, spread=True, **share)
            for name, tokens in shards.items()
        }

    def hear(self, stream: Prefetched, results: dict[str, float]) -> dict[str, float]:
        """See `MixedTask`."""
        losses = {name.removeprefix("loss/"): loss for name, loss in results.items() if name.startswith("loss/")}

        def moved(mixture: OrderedStream[MixtureOrder]) -> dict[str, float]:
            for name in mixture.order.hear(losses):
                share = mixture.order.mixing.weights[name]
                self._progress.note(f"data.mixing: {name} gets more, {share:.1%} of each batch")
            return {f"mixing/{name}": weight for name, weight in mixture.order.mixing.weights.items()}

        return stream.change(moved)


def _decoder_config(model: DecoderModel | DecoderConfig, end_of_text: int) -> DecoderConfig:
    if not isinstance(model, DecoderModel):
        return model
    values = model.model_dump(exclude={"architecture", "init_std"})
    return DecoderConfig.model_validate(values | {"eos_token_ids": (end_of_text,)})


def _initial_tokenizer(recipe: RunRecipe, model: DecoderModel | DecoderConfig) -> Path | None:
    """The folder whose tokenizer a ready model goes on with; None for a model from scratch.

    Raises:
        ConfigError: the checkpoint has none, and a new one would give its tokens other meanings.
    """
    if isinstance(model, DecoderModel) or recipe.initial is None:
        return None
    if not (recipe.initial / "tokenizer.json").is_file():
        raise ConfigError(
            f"initial = {recipe.initial} has no tokenizer.json, and another tokenizer would give its tokens other "
            "meanings; name the folder of its tokenizer by data.tokenizer"
        )
    return recipe.initial


def _check_tokenizer(shards: Path, tokenizer: Path) -> None:
    """Refuse shards whose token ids are not those of `tokenizer`.

    Raises:
        ConfigError: they differ.
    """
    ours = shards / "tokenizer.json"
    if ours.is_file() and read_backend(ours).to_str() != read_backend(tokenizer / "tokenizer.json").to_str():
        raise ConfigError(
            f"data.shards: those of {shards} were made with another tokenizer than that of {tokenizer}; give "
            "data.sources, which are then written in its tokens"
        )


def _new_task(recipe: TrainRecipe, progress: Progress) -> LanguageModeling:
    assert isinstance(recipe.model, DecoderModel)
    if not isinstance(recipe.data, TextData):
        raise ConfigError(
            f"data.kind = {recipe.data.kind!r} needs a model that has learnt a language, and its tokenizer; name a "
            "checkpoint by initial"
        )
    return _language_modeling(recipe, recipe.model, recipe.data, progress)


def _checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> Task:
    if isinstance(recipe.data, PreferenceData):
        return preference_task(folder, recipe, recipe.data, progress)
    if isinstance(recipe.data, RolloutData):
        drafts = isinstance(recipe, TrainRecipe) and recipe.algorithm is not None and recipe.algorithm.kind == "draft"
        return (DraftTuning if drafts else RolloutTuning)(folder, recipe, recipe.data, progress)
    if isinstance(recipe.data, ChatData):
        return ChatTuning(folder, recipe, recipe.data, progress)
    assert isinstance(recipe.data, TextData)
    return _language_modeling(recipe, open_checkpoint(folder).config, recipe.data, progress)


def _language_modeling(
    recipe: RunRecipe, model: DecoderModel | DecoderConfig, data: TextData, progress: Progress
) -> LanguageModeling:
    if data.mixing is not None and data.chunks is not None:
        raise ConfigError("data.mixing and data.chunks exclude each other; leave one of them out")
    kind = LanguageModeling if data.mixing is None else MixedLanguageModeling
    return kind(recipe, model, data, progress)


FAMILY = Family(
    data=(TextData, ChatData, PreferenceData, RolloutData), new_task=_new_task, checkpoint_task=_checkpoint_task
)
