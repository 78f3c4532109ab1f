"""The task of training a decoder on packed text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.manifest import write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import decoder_config_to_hf
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.progress import Progress
from penjing.train.data.pack import prepare_tokens
from penjing.train.data.shards import TokenShards
from penjing.train.data.stream import Stream
from penjing.train.data.tokens import TokenStream, held_out_tokens
from penjing.train.families.base import Family
from penjing.train.objective.balancing import Balanced, BalancingConfig
from penjing.train.objective.objective import Batch, CrossEntropy, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.data import TextData
from penjing.train.recipe.model import DecoderModel
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe
from penjing.train.state.initial import Weights, checkpoint_weights, decoder_weights, fill_weights


class LanguageModeling:
    """A decoder on packed text.

    Args:
        model: a recipe's section, whose end of text is the tokenizer's; or the config of a ready model, whose weights
            are those of `recipe.initial` and whose tokenizer `data` names: both go on into what is exported.
    """

    unit = "tokens"

    def __init__(
        self, recipe: RunRecipe, model: DecoderModel | DecoderConfig, data: TextData, progress: Progress
    ) -> None:
        self._recipe = recipe
        self._model = model
        self._data = data
        if data.sequence_length > model.max_position_embeddings:
            raise ConfigError(
                f"data.sequence_length={data.sequence_length} is more than model.max_position_embeddings="
                f"{model.max_position_embeddings}; raise that"
            )
        self.folder = data.shards or self._prepare(data, progress)
        self._shards = TokenShards(self.folder, "train")
        index = self._shards.index
        if index.vocab_size > model.vocab_size:
            raise ConfigError(
                f"the shards in {self.folder} have a vocabulary of {index.vocab_size}, model.vocab_size is "
                f"{model.vocab_size}; "
                f"set model.vocab_size = {index.vocab_size} or more, or make shards with a smaller tokenizer"
            )
        self.config = _decoder_config(model, index.end_of_text)
        decoder_config_to_hf(self.config)  # a model that no config.json can state is refused before the run
        if data.document_mask and recipe.compile:
            raise ConfigError(
                "data.document_mask and compile exclude each other: every batch has documents of other lengths, and a "
                "compiled model would be compiled again for each; set one of them to false"
            )
        if recipe.evaluation.every:
            next(self.held_out(1, World()))  # text too short to evaluate on is refused before the run
        self._balanced = _balanced(recipe, self.config)
        self.objective: TaskObjective = self._balanced or _cross_entropy(recipe)

    def _prepare(self, data: TextData, progress: Progress) -> Path:
        if not data.sources:
            raise ConfigError("data needs sources (for example ['builtin:prose']) or shards")
        return prepare_tokens(
            data.sources,
            self._model.vocab_size,
            held_out=data.held_out,
            tokenizer=data.tokenizer,
            progress=progress,
        )

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return Decoder(self.config)

    def initialize(self, model: nn.Module) -> None:
        """See `Task`."""
        fill_weights(model, self.weights())

    def weights(self) -> Weights:
        """See `Task`."""
        if self._recipe.initial is not None:
            return checkpoint_weights(self._recipe.initial)
        assert isinstance(self._model, DecoderModel), "a ready model has `initial` weights"
        return decoder_weights(self._model.init_std, self.config.num_hidden_layers, self._recipe.seed)

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        batch = next(iter(self.stream(micro_batch, World(size=self._data.batch_size // micro_batch))))
        batch.pop("documents", None)  # whole rows are the upper bound of time and memory
        return batch

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        return TokenStream(
            self._shards,
            self._data.sequence_length,
            batch_size=self._data.batch_size,
            micro_batch=micro_batch,
            rank=world.rank,
            world_size=world.size,
            seed=self._recipe.seed,
            document_mask=self._data.document_mask,
        )

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        return held_out_tokens(
            TokenShards(self.folder, "held_out"),
            self._data.sequence_length,
            micro_batch=micro_batch,
            max_samples=self._recipe.evaluation.samples,
            rank=world.rank,
            world_size=world.size,
            document_mask=self._data.document_mask,
        )

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: router biases."""
        if self._balanced is None:
            return ()
        self._balanced.world = world
        if not self._balanced.config.bias_rate:
            return ()
        return (self._balanced.bias_update(model, world),)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        parameters = dict(model.named_parameters())
        tensors = ((name, parameters[name].detach().cpu()) for name in tensor_shapes(self.config))
        save_checkpoint(folder, self.config, tensors, tokenizer_from=self._data.tokenizer or self.folder)
        write_manifest(folder, "checkpoint", created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return f'penjing generate {folder} "The import statement"'


def _decoder_config(model: DecoderModel | DecoderConfig, end_of_text: int) -> DecoderConfig:
    if not isinstance(model, DecoderModel):
        return model
    values = model.model_dump(exclude={"architecture", "init_std"})
    return DecoderConfig.model_validate(values | {"eos_token_ids": (end_of_text,)})


def _cross_entropy(recipe: RunRecipe) -> CrossEntropy:
    return CrossEntropy("tokens", recipe.objective.label_smoothing)


def _balanced(recipe: RunRecipe, config: DecoderConfig) -> Balanced | None:
    """The objective of a decoder with experts; None for one without."""
    balancing = recipe.balancing
    if config.moe is None:
        if balancing != BalancingConfig():
            raise ConfigError("[balancing] is for experts, and the model has none; add [model.moe] or leave it out")
        return None
    if balancing.bias_rate and not config.moe.router_bias:
        raise ConfigError(
            f"balancing.bias_rate={balancing.bias_rate} moves router biases, and the model has none; set "
            "model.moe.router_bias = true, or use balancing.auxiliary_loss"
        )
    return Balanced(_cross_entropy(recipe), balancing)


def _new_task(recipe: TrainRecipe, progress: Progress) -> LanguageModeling:
    assert isinstance(recipe.model, DecoderModel)
    assert isinstance(recipe.data, TextData)
    return LanguageModeling(recipe, recipe.model, recipe.data, progress)


def _checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> LanguageModeling:
    assert isinstance(recipe.data, TextData)
    return LanguageModeling(recipe, open_checkpoint(folder).config, recipe.data, progress)


FAMILY = Family(data=(TextData,), new_task=_new_task, checkpoint_task=_checkpoint_task)
