"""Parts of a distillation loss that compare the inside of two networks: hidden states, and relations of attention.

Layers are mapped evenly: of a student with half the layers, each learns from every second of the teacher's, the last
from the last. Modules are watched from outside; no forward pass is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor, nn

from penjing.compress.distill.task import PROJECTIONS
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.resnet_config import ResNetConfig
from penjing.train.objective.objective import IGNORED, Batch

Architecture = DecoderConfig | ResNetConfig


def even_map(student: int, teacher: int) -> list[int]:
    """For each of `student` layers, the one of `teacher` ≥ `student` layers that it learns from.

    >>> even_map(2, 6)
    [2, 5]
    """
    return [-(-(layer + 1) * teacher // student) - 1 for layer in range(student)]


def _layers(config: Architecture) -> list[tuple[str, int]]:
    """(module, width) of what is compared: a decoder's layers, the last block of each stage of a ResNet."""
    if isinstance(config, DecoderConfig):
        return [(f"model.layers.{layer}", config.hidden_size) for layer in range(config.num_hidden_layers)]
    ends = torch.tensor([len(stage.blocks) for stage in config.stages]).cumsum(0).tolist()
    return [(f"blocks.{end - 1}", stage.channels) for end, stage in zip(ends, config.stages, strict=True)]


class HiddenStates:
    """Hidden states after each layer, projected to the teacher's width: the mean over layers of ‖P h - t‖² / ‖t‖².

    Relative to the teacher's, so that layers weigh alike whatever their scale. The norms run over what belongs to one
    term: a token's features, an image's positions and channels. After FitNets (https://arxiv.org/abs/1412.6550).
    """

    name = "hidden"

    def __init__(self, student: Architecture, teacher: Architecture) -> None:
        ours, theirs = _layers(student), _layers(teacher)
        pairs = [(ours[layer], theirs[other]) for layer, other in enumerate(even_map(len(ours), len(theirs)))]
        self.student = tuple(mine[0] for mine, _ in pairs)
        self.teacher = tuple(other[0] for _, other in pairs)
        self._widths = [(mine[1], other[1]) for mine, other in pairs]

    def projections(self) -> nn.Module:
        """What the loss trains beside the student: a matrix for each pair of layers."""
        return nn.ModuleList(nn.Linear(ours, theirs, bias=False) for ours, theirs in self._widths)

    def loss(self, model: nn.Module, seen: list[Tensor], taught: list[Tensor], batch: Batch) -> Tensor:
        """See `Matcher`.

        Raises:
            InputError: the layers see images at different resolutions.
        """
        projections = model.get_submodule(PROJECTIONS)
        assert isinstance(projections, nn.ModuleList)
        counted = batch["targets"].flatten() != IGNORED
        parts = []
        for projection, ours, theirs, names in zip(
            projections, seen, taught, zip(self.student, self.teacher, strict=True), strict=True
        ):
            h, t = _terms(ours), _terms(theirs)
            if h.shape[:2] != t.shape[:2]:
                raise InputError(
                    f"{names[0]} of the student gives {tuple(ours.shape)}, {names[1]} of the teacher "
                    f"{tuple(theirs.shape)}: their resolutions differ; set weights.hidden = 0"
                )
            error = (projection(h) - t).square().sum((1, 2)) / t.square().sum((1, 2)).clamp(min=1e-12)
            parts.append(torch.where(counted, error, 0.0).sum())
        return torch.stack(parts).mean()


def _terms(values: Tensor) -> Tensor:
    """(terms, positions, channels) float32 of an image's (N, C, H, W) or of tokens' (…, T, E)."""
    values = values.to(torch.float32)
    return values.flatten(2).transpose(1, 2) if values.dim() == 4 else values.flatten(0, -2)[:, None]


@dataclass(frozen=True)
class AttentionRelations:
    """How queries relate to queries, keys to keys, values to values in the last layer, whatever the two widths.

    The projections (before the rotation) are cut into `heads` relation heads; a token's relations are the softmax of
    its scaled products with the tokens that it may see. The loss is KL(teacher ‖ student), the mean over heads and the
    three kinds, summed over the counted tokens. MiniLMv2, https://arxiv.org/abs/2012.15828, with a causal mask.

    Attributes:
        window: tokens that a query sees where a last layer slides, itself included; of two windows the smaller.
    """

    student: tuple[str, ...]
    teacher: tuple[str, ...]
    heads: int
    window: int | None = None
    name: str = "relations"

    @staticmethod
    def between(student: Architecture, teacher: Architecture, heads: int | None) -> AttentionRelations:
        """The relations of two decoders; `heads` None: as many as divide all widths, up to the teacher's.

        Raises:
            ConfigError: not both have plain attention, or `heads` does not divide a width.
        """
        widths, windows = list[int](), list[int]()
        for config in (student, teacher):
            if not isinstance(config, DecoderConfig) or config.latent_attention is not None:
                raise ConfigError("weights.relations is for decoders with plain attention; set it to 0")
            if config.is_conv(config.num_hidden_layers - 1):
                raise ConfigError("weights.relations is of the last layer's attention, and it has none; set it to 0")
            widths += [config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim]
            windows += filter(None, [config.layer_window(config.num_hidden_layers - 1)])
        common = gcd(*widths)
        if heads is None:
            assert isinstance(teacher, DecoderConfig)
            most = min(teacher.num_attention_heads, common)
            heads = next(count for count in range(most, 0, -1) if common % count == 0)
        if common % heads:
            raise ConfigError(
                f"relation_heads={heads} does not divide all of {sorted(set(widths))}; take a divisor of {common}"
            )
        return AttentionRelations(_projections(student), _projections(teacher), heads, min(windows, default=None))

    def loss(self, model: nn.Module, seen: Sequence[Tensor], taught: Sequence[Tensor], batch: Batch) -> Tensor:
        """See `Matcher`."""
        targets = batch["targets"]
        length = targets.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool, device=targets.device).tril()
        if self.window is not None:
            visible = visible.triu(1 - self.window)
        if "documents" in batch:
            documents = batch["documents"]
            visible = visible & (documents[..., :, None] == documents[..., None, :])[..., None, :, :]
        parts = []
        for ours, theirs in zip(seen, taught, strict=True):
            s, t = self._relations(ours, visible), self._relations(theirs, visible)
            terms = torch.where(visible, t.exp() * (t - s), 0.0).sum(-1).mean(-2)  # (…, T)
            parts.append(torch.where(targets != IGNORED, terms, 0.0).sum())
        return torch.stack(parts).mean()

    def _relations(self, values: Tensor, visible: Tensor) -> Tensor:
        """Log-probabilities (…, heads, T, T); a large negative number where nothing is seen."""
        heads = values.to(torch.float32).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        scores = heads @ heads.transpose(-2, -1) / heads.shape[-1] ** 0.5
        return scores.masked_fill(~visible, -1e9).log_softmax(-1)


def _projections(config: Architecture) -> tuple[str, ...]:
    assert isinstance(config, DecoderConfig)
    layer = f"model.layers.{config.num_hidden_layers - 1}.self_attn"
    return tuple(f"{layer}.{name}_proj" for name in "qkv")
