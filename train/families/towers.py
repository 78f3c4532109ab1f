"""The task of training an image network and a text encoder so that what belongs together lies close."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.checkpoint.towers import load_towers, save_towers
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import TensorSpec
from penjing.core.images.normalise import normalise
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.progress import Progress, once, typed
from penjing.core.text.text_tokenizer import TextTokenizer, encoder_config, pad
from penjing.core.vision.graph_eyes import GraphTower, GraphTowerConfig, colours_of
from penjing.core.vision.paired_config import ImageTransformerConfig
from penjing.core.vision.towers import LARGEST_SCALE, TwoTowers, text_tower
from penjing.core.vision.towers_config import TowersConfig
from penjing.core.vision.vit import initialize_vit
from penjing.train.chat.held_out import held_out_places
from penjing.train.data.emoji import BUILTIN, emoji_pairs
from penjing.train.data.stream import Draw, Stream, shuffled
from penjing.train.families.base import NOTHING_HELD_OUT, Family
from penjing.train.families.classifier import initialize_resnet, resnet_config
from penjing.train.families.eyes import tower_of
from penjing.train.objective.contrastive import Contrastive
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.data import PairData
from penjing.train.recipe.model import GraphTower as GraphTowerModel
from penjing.train.recipe.model import ResNetModel, TowersModel, ViTTower
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe
from penjing.train.sources.pairs import open_pairs
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Source
from penjing.train.sources.stream import augmented
from penjing.train.state.state import check_finite

_HALF = 0.5  # mean and deviation of pixels, as SigLIP takes them
_TEMPERATURE = {"clip": 0.07, "siglip": 0.1}
_FIRST_BIAS = -10.0  # of siglip, since nearly all comparisons are negative
_TEXTS = 64  # that are seen at once


@dataclass(frozen=True)
class TextedImages:
    """Images and texts as `Indexed`: see `Contrastive` for what a batch has.

    Attributes:
        texts: the token ids of each different text.
        features: (texts, H), what the text tower makes of them, where it is not trained.
    """

    reader: Reader
    data: PairData
    texts: list[list[int]]
    features: Tensor | None

    def __len__(self) -> int:
        return len(self.reader)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        images, group = self.reader.images(draw.samples)
        pixels = self.reader.form.pixels
        assert pixels is not None, "the reader is made for images"
        if draw.random is not None:
            # Drawings lie on white: a black border would tell how far each was moved.
            grey = tuple(255 * value for value in pixels.mean)
            images = augmented(images, draw.random, self.data, grey, "edge")
        mean, std = (np.array(values, np.float32) for values in (pixels.mean, pixels.std))
        batch = {
            "images": torch.from_numpy(np.array(normalise(images.transpose(0, 3, 1, 2), mean, std), order="C")),
            "group": torch.from_numpy(group),
            "real": torch.from_numpy(draw.real.copy()),
        }
        return batch | self.words(group.tolist())

    def words(self, group: list[int]) -> Batch:
        """The part of a batch that the text tower sees."""
        if self.features is not None:
            return {"features": self.features[group]}
        tokens, mask = pad([self.texts[each] for each in group]).tensors()
        return {"tokens": tokens, "mask": mask}


class TowerTraining:
    """Two towers on images with texts.

    Args:
        config: what is trained.
        text: a folder with the tokenizer, and with the text tower unless `recipe.initial` has it.
        weights: of the image tower, where it does not begin anew.
    """

    unit = "pairs"

    def __init__(
        self,
        recipe: RunRecipe,
        config: TowersConfig,
        text: Path,
        data: PairData,
        progress: Progress,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        _check_run(recipe)
        self._weights = weights
        self._recipe, self._data, self.config, self._text = recipe, data, config, text
        self._tokenizer = TextTokenizer(text, config.text)
        source = _open(data.sources, data, progress)
        texts = list(map(str, source.labels or ()))
        every = np.arange(source.size)
        if data.held_out_sources and recipe.evaluation.every:
            kept = _open(data.held_out_sources, data, progress)
            learnt, held = every, np.arange(kept.size)
        else:
            kept = source
            share = data.held_out if recipe.evaluation.every else 0.0
            places = held_out_places([each.encode() for each in texts], share)
            held = np.array(sorted(places), np.int64)
            learnt = np.setdiff1d(every, held)
        names = tuple(sorted({*texts, *map(str, kept.labels or ())}))
        tokens = self._tokenizer.rows(list(names))
        features = self._features(tokens, progress) if self._text_is_frozen() else None
        settings = SourceSettings(max_broken=data.max_broken, workers=data.workers)
        shape = ("batch", config.channels, *config.image_size)
        spec = TensorSpec(name="images", dtype="float32", shape=shape)

        def pairs(of: Source, indices: np.ndarray) -> TextedImages:
            form = Form((spec,), config.pixels, len(names), names)
            return TextedImages(Reader(of, indices, form, settings, once(progress)), data, tokens, features)

        self._learnt = pairs(source, learnt)
        self._held = pairs(kept, held) if recipe.evaluation.every and len(held) else None
        if recipe.evaluation.every and self._held is None:
            raise ConfigError(NOTHING_HELD_OUT)
        progress.note(
            f"{len(self._learnt):,} pairs are learnt, {0 if self._held is None else len(self._held):,} are held out; "
            f"{len(names):,} different texts of up to {max(map(len, tokens))} tokens"
        )
        assert recipe.objective.kind in ("clip", "siglip"), "the recipe is checked"
        self._objective = Contrastive("clip" if recipe.objective.kind == "clip" else "siglip")
        self.objective: TaskObjective = self._objective

    def build_model(self) -> nn.Module:
        """See `Task`."""
        return TwoTowers(self.config)

    @torch.no_grad()
    def initialize(self, model: nn.Module) -> None:
        """See `Task`."""
        assert isinstance(model, TwoTowers)
        torch.manual_seed(self._recipe.seed)
        if self._recipe.initial is not None:
            given = load_towers(self._recipe.initial).state_dict()
            check_finite(given, f"initial = {self._recipe.initial}")
            model.load_state_dict(given)
            return
        self._initialize_image(model.image)
        nn.init.normal_(model.text_projection.weight, 0.0, self.config.text.hidden_size**-0.5)
        kind = self.config.loss
        model.logit_scale.fill_(-math.log(self._recipe.objective.temperature or _TEMPERATURE[kind]))
        if model.logit_bias is not None:
            model.logit_bias.fill_(_FIRST_BIAS)
        model.text.load_state_dict(load_encoder(self._text).state_dict())

    def _initialize_image(self, image: nn.Module) -> None:
        if isinstance(image, ResNet):
            initialize_resnet(image)
        elif isinstance(image, GraphTower):
            assert self._weights is not None, "a graph comes with its weights"
            image.eyes.load_state_dict(self._weights)
            nn.init.normal_(image.projection.weight, 0.0, image.projection.in_features**-0.5)
        else:
            initialize_vit(image)

    def weights(self) -> None:
        """See `Task`."""

    def example(self, micro_batch: int) -> Batch:
        """See `Task`: with the longest text."""
        batch = self._learnt.batch(Draw(np.zeros(micro_batch, np.int64), np.ones(micro_batch, np.bool_)))
        texts = self._learnt.texts
        longest = max(range(len(texts)), key=lambda place: len(texts[place]))
        return batch | self._learnt.words([longest] * micro_batch) | {"group": torch.arange(micro_batch)}

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        return shuffled(
            self._learnt, batch_size=self._data.batch_size, micro_batch=micro_batch, rank=world.rank,
            world_size=world.size, seed=self._recipe.seed,
        )  # fmt: skip

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`: all pairs at once in every process, since each is compared with all others."""
        assert self._held is not None
        count = min(len(self._held), self._recipe.evaluation.samples)
        places = np.random.default_rng(0).permutation(len(self._held))[:count]
        yield self._held.batch(Draw(places, np.ones(count, np.bool_)))

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: CLIP's scale stays at 100 or below."""
        self._objective.bind(world)
        assert isinstance(model, TwoTowers)
        scale = model.logit_scale

        @torch.no_grad()
        def bound(_: int) -> None:
            scale.clamp_(max=LARGEST_SCALE)

        return (bound,) if self.config.loss == "clip" else ()

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        save_towers(folder, model, self.config, self._text, self._tokenizer.max_tokens, created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return f"penjing serve {typed(folder)}"

    def _text_is_frozen(self) -> bool:
        with torch.device("meta"):
            names = [f"text.{name}" for name, _ in text_tower(self.config.text).named_parameters()]
        return all(any(fnmatch(name, pattern) for pattern in self._recipe.freeze) for name in names)

    @torch.no_grad()
    def _features(self, tokens: list[list[int]], progress: Progress) -> Tensor:
        initial = self._recipe.initial
        tower = load_encoder(self._text) if initial is None else load_towers(initial).text
        progress.start("reading the texts once, since text.* is frozen", -(-len(tokens) // _TEXTS))
        order = sorted(range(len(tokens)), key=lambda place: len(tokens[place]))  # little padding
        found = torch.empty(len(tokens), self.config.text.hidden_size)
        for begin in range(0, len(order), _TEXTS):
            places = order[begin : begin + _TEXTS]
            found[places] = tower(*pad([tokens[place] for place in places]).tensors())
            progress.advance()
        return found


def _open(sources: tuple[str, ...], data: PairData, progress: Progress) -> Source:
    paths = [
        str(emoji_pairs(each.removeprefix(BUILTIN), progress)) if each.startswith(BUILTIN) else each for each in sources
    ]
    settings = SourceSettings(column=data.column, max_broken=data.max_broken, workers=data.workers)
    return open_pairs(paths, settings, data.text_column)


def _check_run(recipe: RunRecipe) -> None:
    if recipe.objective.kind not in ("clip", "siglip"):
        raise ConfigError(
            f"data.kind = 'pairs' has images and texts, which objective.kind = {recipe.objective.kind!r} does not "
            "compare; set objective.kind = 'clip' or 'siglip'"
        )
    if not recipe.parallel.is_plain:
        raise ConfigError(
            "data.kind = 'pairs' takes data parallelism alone; set parallel.zero to 0, and tp, pp, cp and ep to 1"
        )
    if recipe.compile:
        raise ConfigError(
            "compile = true is not for data.kind = 'pairs', whose texts differ in length; set it to false"
        )


def _new_task(recipe: TrainRecipe, progress: Progress) -> TowerTraining:
    model, data = recipe.model, recipe.data
    assert isinstance(model, TowersModel)
    assert isinstance(data, PairData)
    weights, size = None, (data.height, data.width)
    half = (_HALF,) * data.channels
    if isinstance(model.image, GraphTowerModel):
        eyes, pixels = tower_of(model.image.folder, model.image.node)
        image = GraphTowerConfig(eyes=eyes.config, dimension=model.dimension)
        if (own := (pixels.height, pixels.width, len(pixels.mean))) != (*size, data.channels):
            raise ConfigError(
                f"{model.image.folder} takes images of {own[0]} x {own[1]} pixels and {own[2]} channels; set "
                f"data.height = {own[0]}, data.width = {own[1]} and data.channels = {own[2]}"
            )
        weights, (mean, std) = eyes.state_dict(), colours_of(pixels)
        look = {"mean": mean, "std": std, "fit": pixels.fit, "resize": pixels.resize, "filter": pixels.filter}
    else:
        image = _new_image(model.image, model.dimension, data)
        look = {"mean": half, "std": half}
    config = TowersConfig.model_validate(
        {
            "image": image,
            "image_size": size,
            "text": encoder_config(model.text),
            "loss": "siglip" if recipe.objective.kind == "siglip" else "clip",
            **look,
        }
    )
    return TowerTraining(recipe, config, model.text, data, progress, weights)


def _new_image(model: ResNetModel | ViTTower, dimension: int, data: PairData) -> ResNetConfig | ImageTransformerConfig:
    if isinstance(model, ResNetModel):
        return resnet_config(model, dimension, data.channels)
    if data.height != data.width:
        raise ConfigError(f"model.image: a vision transformer sees squares; set data.width = {data.height}")
    sizes = model.model_dump(exclude={"architecture"})
    given = {
        **sizes, "image_size": data.height, "num_channels": data.channels, "dimension": dimension, "pooling": "class",
        "layer_norm_eps": 1e-5, "activation": "gelu",
    }  # fmt: skip
    return parse_config(ImageTransformerConfig, given, "model.image")


def _checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> TowerTraining:
    assert isinstance(recipe.data, PairData)
    config = towers_config(folder)
    if isinstance(recipe, TrainRecipe) and recipe.model is not None:
        raise InputError(f"initial = {folder} brings its architecture; leave [model] out")
    if recipe.objective.kind in ("clip", "siglip") and recipe.objective.kind != config.loss:
        raise ConfigError(f"{folder} has learnt by {config.loss!r}; set objective.kind = {config.loss!r}")
    return TowerTraining(recipe, config, folder, recipe.data, progress)


FAMILY = Family(data=(PairData,), new_task=_new_task, checkpoint_task=_checkpoint_task)
