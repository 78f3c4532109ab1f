"""The task of teaching a decoder to see: answers to questions about images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.vision_language import (
    layout_of,
    load_vision_language,
    save_vision_language,
    vision_language_config,
)
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import OWN_SEEING
from penjing.core.progress import Progress, typed
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.vision.projector import linears
from penjing.core.vision.sight import picture_of, pixels_of
from penjing.core.vision.vision_language import VisionLanguage, VisionLanguageConfig
from penjing.core.vision.vit import VisionTransformer, initialize_vit
from penjing.train.chat.held_out import held_out_places
from penjing.train.chat.rows import Row, take_rows
from penjing.train.chat.sighted import Sighted, SightedRows, SightTokens
from penjing.train.chat.tokens import ChatTokens
from penjing.train.data.stream import Draw, Stream, one_pass, shuffled
from penjing.train.families.base import NOTHING_HELD_OUT, Family
from penjing.train.families.eyes import encoder_of
from penjing.train.objective.answers import Answers
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.data import SightData
from penjing.train.recipe.model import VisionLanguageModel
from penjing.train.recipe.recipe import ObjectiveConfig, RunRecipe, TrainRecipe
from penjing.train.sources.decoders import FORMATS
from penjing.train.sources.scenes import SCENES, SIDE, scenes
from penjing.train.state.state import check_finite

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class SightTuning:
    """A decoder that sees.

    Args:
        config: what is trained.
        decoder: a folder with the tokenizer, and with the decoder unless `recipe.initial` has it.
        token: what the tokenizer calls `config.image_token_id`; it is added where it is new.
        weights: of the encoder, where it does not begin anew.
    """

    unit = "tokens"

    def __init__(
        self,
        recipe: RunRecipe,
        config: VisionLanguageConfig,
        decoder: Path,
        token: str,
        data: SightData,
        progress: Progress,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        _check_run(recipe, config, data)
        self._recipe, self._data, self.config, self._decoder = recipe, data, config, decoder
        self._weights = weights
        writer = ChatTokens.from_folder(decoder, data.template, data.learn)
        image_token(writer.tokenizer, token)
        self._tokenizer = writer.tokenizer
        self._template = None if data.template is None or writer.template is None else writer.template.text
        pixels = pixels_of(config)
        read = partial(picture_of, config, formats=FORMATS)
        self._writer = SightTokens(writer, token, config.rows, read, data.images, data.sequence_length)
        rows = self._read(data.sources, progress)
        kept: list[Sighted] = []
        if data.held_out_sources and recipe.evaluation.every:
            kept = self._read(data.held_out_sources, progress)
        elif recipe.evaluation.every:
            places = held_out_places([row.key for row in rows], data.held_out)
            kept = [rows[place] for place in sorted(places)]
            rows = [row for place, row in enumerate(rows) if place not in places]
            if not kept:
                raise ConfigError(NOTHING_HELD_OUT)
        pad = config.decoder.pad_token_id
        pad = next(iter(self._tokenizer.eos_token_ids), 0) if pad is None else pad
        self._learnt, self._held = (SightedRows(each, pad, pixels, data.blind, data.questions) for each in (rows, kept))
        progress.note(
            f"{len(rows):,} conversations about images are learnt, {len(kept):,} are held out; an image takes "
            f"{config.rows} tokens" + (", and is grey: data.blind" if data.blind else "")
        )
        self.objective: TaskObjective = Answers()

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return VisionLanguage(self.config)

    @torch.no_grad()
    def initialize(self, model: nn.Module) -> None:
        """See `Task`: the decoder is the checkpoint's, and an image token that is new the mean of all tokens."""
        assert isinstance(model, VisionLanguage)
        if self._recipe.initial is not None:
            given = load_vision_language(self._recipe.initial).state_dict()
            check_finite(given, f"initial = {self._recipe.initial}")
            model.load_state_dict(given)
            return
        torch.manual_seed(self._recipe.seed)
        if isinstance(model.vision, VisionTransformer):
            initialize_vit(model.vision)
        else:
            assert self._weights is not None, "a graph comes with its weights"
            model.vision.load_state_dict(self._weights)
        for _, layer in linears(model.projector):
            nn.init.normal_(layer.weight, 0.0, layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        checkpoint = open_checkpoint(self._decoder)
        for name, parameter in model.decoder.named_parameters():
            parameter.copy_(_taken(checkpoint, name, parameter))
        model.decoder.tie_weights()

    def weights(self) -> None:
        """See `Task`."""

    def example(self, micro_batch: int) -> Batch:
        """See `Task`: the longest row."""
        rows = self._learnt.rows
        longest = max(range(len(rows)), key=lambda place: (rows[place].longest, len(rows[place].pictures)))
        return self._learnt.batch(Draw(np.full(micro_batch, longest), np.ones(micro_batch, np.bool_)))

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        return shuffled(
            self._learnt, batch_size=self._data.batch_size, micro_batch=micro_batch, rank=world.rank,
            world_size=world.size, seed=self._recipe.seed,
        )  # fmt: skip

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`."""
        rows, most = self._held, self._recipe.evaluation.samples
        return one_pass(rows, most, micro_batch=micro_batch, rank=world.rank, world_size=world.size, spread=True)

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: nothing."""
        return ()

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`: as Hugging Face's Idefics3 or LLaVA."""
        save_vision_language(
            folder, self.config, model, self._decoder, created_by,
            tokenizer=self._tokenizer.backend.to_str(pretty=True), template=self._template,
        )  # fmt: skip

    def next_command(self, folder: Path) -> str:
        """See `Task`: a picture or a recording of the user's own is asked about."""
        file = "photo.png" if self.config.look.sound is None else "recording.wav"
        if ChatTemplate.from_folder(folder) is not None:
            return f"penjing serve {typed(folder)}, then penjing chat --image {file}"
        return f'penjing generate {typed(folder)} "What is here?" --image {file}'

    def _read(self, sources: tuple[str, ...], progress: Progress) -> list[Sighted]:
        rows: list[Sighted] = []
        if files := [each for each in sources if each not in SCENES]:
            found, _ = take_rows(files, self._take, self._data.most_damaged, progress)
            rows += found
        for name in (each for each in sources if each in SCENES):
            if self.config.vision.image_size != SIDE or self.config.look.sound is not None:
                raise ConfigError(
                    f"{name} has images of {SIDE} pixels, the encoder of {self.config.vision.image_size}; set "
                    f"model.vision.image_size = {SIDE}, or take an encoder of such images, and no model.sound"
                )
            rows += self._writer.questions((scene.picture, scene.turns) for scene in scenes(name, progress))
        return rows

    def _take(self, row: Row) -> Sighted:
        return self._writer.row(row)


def image_token(tokenizer: Tokenizer, token: str) -> int:
    """The id of the image token, which the tokenizer gets if it has none."""
    if tokenizer.token_to_id(token) is None:
        tokenizer.backend.add_special_tokens([token])
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def _taken(checkpoint: Checkpoint, name: str, parameter: Tensor) -> Tensor:
    """A tensor of the checkpoint; embeddings with a mean row for each token that is new."""
    tensor = checkpoint.get(name).to(torch.float32)
    check_finite({name: tensor}, str(checkpoint.folder))
    more = parameter.shape[0] - tensor.shape[0]
    if more > 0 and name in (EMBEDDING, HEAD):
        tensor = torch.cat([tensor, tensor.mean(0, keepdim=True).expand(more, -1)])
    if tensor.shape != parameter.shape:
        raise InputError(
            f"{checkpoint.folder}: {name} has shape {tuple(tensor.shape)}, its config.json says "
            f"{tuple(parameter.shape)}; get it again"
        )
    return tensor


def _check_run(recipe: RunRecipe, config: VisionLanguageConfig, data: SightData) -> None:
    if recipe.objective != ObjectiveConfig():
        raise ConfigError("[objective] is not for data.kind = 'image-chat', whose answers are learnt; leave it out")
    parallel = recipe.parallel
    if parallel.pp * parallel.cp * parallel.ep > 1 or parallel.sequence:
        raise ConfigError(
            "data.kind = 'image-chat' takes data parallelism, ZeRO and parallel.tp; set parallel.pp, cp and ep to 1, "
            "and parallel.sequence to false"
        )
    if recipe.compile:
        raise ConfigError("compile = true is not for data.kind = 'image-chat', whose texts differ in length")
    if recipe.adapter is not None:
        raise ConfigError("[adapter] is for decoders alone; leave it out, or freeze parts of the model")
    if data.sequence_length > (most := config.decoder.max_position_embeddings):
        raise ConfigError(f"data.sequence_length={data.sequence_length} is more than the {most} tokens that it sees")
    if data.sequence_length <= config.rows:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length} has no room for the {config.rows} tokens of an image; raise "
            "it, or raise model.scale_factor"
        )


def _new_task(recipe: TrainRecipe, progress: Progress) -> SightTuning:
    model, data = recipe.model, recipe.data
    assert isinstance(model, VisionLanguageModel)
    assert isinstance(data, SightData)
    checkpoint = open_checkpoint(model.decoder)
    if checkpoint.quantization is not None:
        raise InputError(f"model.decoder = {model.decoder} is quantized; take the checkpoint that it was made from")
    token = image_token(Tokenizer.from_folder(model.decoder), model.image_token)
    decoder = checkpoint.config.model_copy(update={"vocab_size": max(checkpoint.config.vocab_size, token + 1)})
    vision, look, weights = encoder_of(model, recipe.seed)
    try:
        config = VisionLanguageConfig(
            vision=vision, decoder=decoder, scale_factor=model.scale_factor, projector=model.projector,
            image_token_id=token, look=look.model_copy(update={"sound": model.sound}),
        )  # fmt: skip
    except ValidationError as error:
        raise ConfigError(f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    if layout_of(config) == OWN_SEEING:
        progress.note("no folder of Hugging Face holds such a network: the checkpoint is in a layout of penjing's own")
    return SightTuning(recipe, config, model.decoder, model.image_token, data, progress, weights)


def _checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> SightTuning:
    assert isinstance(recipe.data, SightData)
    if isinstance(recipe, TrainRecipe) and recipe.model is not None:
        raise InputError(f"initial = {folder} brings its architecture; leave [model] out")
    config = vision_language_config(folder)
    token = Tokenizer.from_folder(folder).id_to_token(config.image_token_id)
    if token is None:
        raise InputError(f"{folder}: its tokenizer has no token {config.image_token_id}, which stands for images")
    return SightTuning(recipe, config, folder, token, recipe.data, progress)


FAMILY = Family(data=(SightData,), new_task=_new_task, checkpoint_task=_checkpoint_task)
