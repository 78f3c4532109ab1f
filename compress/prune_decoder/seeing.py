"""A decoder that sees as what pruning takes: its decoder, and the vision transformer before it.

What is analysed is the whole network, so that where the residual stream gets narrower the projection does with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.measure.skeleton import BATCH, seeing_skeleton
from penjing.compress.prune.graph import Group, Place
from penjing.compress.prune.ranking import Choice
from penjing.compress.prune.subject import Part, Shapes
from penjing.compress.prune.surgery import Cut
from penjing.compress.prune_decoder.subject import DecoderSubject
from penjing.core.checkpoint.vision_language import load_vision_language, save_vision_language
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Progress
from penjing.core.vision.vision_language import VisionLanguage, VisionLanguageConfig
from penjing.core.vision.vit import ViTConfig

EYES = {"vision_ffn": "mlp.fc1.weight", "vision_heads": "self_attn.q_proj.weight"}
"""Parts of the vision transformer, and of each layer the tensor whose rows tell their units."""
_DECODER, _LAYERS = "decoder.", "vision.encoder.layers."


class SeeingSubject:
    """See `Subject`.

    Args:
        parts: those of `DecoderSubject`, "vision_ffn" and "vision_heads".

    Raises:
        ConfigError, InputError: see `DecoderSubject`; a part of the vision transformer where there is none.
    """

    unit: str = "question"
    inputs = BATCH

    def __init__(self, folder: Path, parts: Sequence[str], dropped: Sequence[int], progress: Progress) -> None:
        self.folder = folder
        self._parts = [part for part in parts if part in EYES]
        self._decoder = DecoderSubject(folder, [part for part in parts if part not in EYES], dropped, progress)
        self.dropped, self.kept_whole = self._decoder.dropped, self._decoder.kept_whole
        whole = load_vision_language(folder)
        if self._parts and not isinstance(whole.config.vision, ViTConfig):
            raise ConfigError(f"{self._parts[0]} is of a vision transformer; {folder} sees with a graph: leave it out")
        self._config = whole.config.model_copy(update={"decoder": self._decoder.config})
        self._eyes = nn.ModuleDict({"vision": whole.vision, "projector": whole.projector})
        self.dense: nn.Module = seeing_skeleton(whole.config)[0]
        # Windows and soft caps do not decide about channels, see `DecoderSubject`.
        model, self.example = seeing_skeleton(self._config)
        model.set_submodule("decoder", self._decoder.model)
        self.model: nn.Module = model

    def weights(self, name: str) -> Tensor | None:
        """See `Subject`."""
        if name.startswith(_DECODER):
            return self._decoder.weights(name.removeprefix(_DECODER))
        return dict(self._eyes.named_parameters()).get(name)

    def network(self) -> nn.Module:
        """See `Subject`."""
        with torch.device("meta"):
            model = VisionLanguage(self._config)
        model.set_submodule("decoder", self._decoder.network())
        for name, part in self._eyes.items():
            model.set_submodule(name, copy.deepcopy(part))
        return model.eval()

    def parts(self, groups: Sequence[Group]) -> dict[Part, list[Group]]:
        """See `Subject`.

        Raises:
            InputError: a part has nothing that can leave.
        """
        renamed = {id(short := _short(group)): (short, group) for group in groups}
        found = self._decoder.parts([short for short, _ in renamed.values()])
        named: dict[Part, list[Group]] = {
            part: [renamed[id(short)][1] for short in members] for part, members in found.items()
        }
        for part in self._parts:
            members = [group for group in groups if _is(part, group)]
            if not members:
                raise InputError(
                    f"{self.folder}: nothing of {part!r} can leave: there is one head, or it is protected; leave it "
                    "out of parts"
                )
            named[part] = members  # pyright: ignore[reportArgumentType]
        return named

    def config_of(self, shapes: Shapes, choice: Choice) -> VisionLanguageConfig:
        """See `Subject`.

        Raises:
            ConfigError: the layers of the vision transformer would have unlike numbers of heads.
        """
        short = {name.removeprefix(_DECODER): shape for name, shape in shapes.items() if name.startswith(_DECODER)}
        changed: dict[str, Any] = {"decoder": self._decoder.config_of(short, choice)}
        if isinstance(vision := self._config.vision, ViTConfig):
            changed["vision"] = _vision_of(vision, shapes)
        return self._config.model_copy(update=changed)

    def build(self, config: VisionLanguageConfig) -> nn.Module:
        """See `Subject`."""
        return VisionLanguage(config).to(torch.get_default_device()).eval()

    def item_bytes(self, name: str) -> int:
        """See `Subject`; what it sees with is taken to be stored in float32."""
        return self._decoder.item_bytes(name.removeprefix(_DECODER)) if name.startswith(_DECODER) else 4

    @torch.no_grad()
    def write(self, partial: Path, config: Any, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """See `Subject`; all tensors in float32."""
        model = VisionLanguage(config)
        for name, tensor in self._eyes.state_dict().items():
            cut = cuts[name].of(tensor) if name in cuts else tensor
            model.state_dict()[name].copy_(cut)
        short = {name.removeprefix(_DECODER): cut for name, cut in cuts.items()}
        for name, tensor in self._decoder.smaller(config.decoder, short):
            model.decoder.get_parameter(name).copy_(tensor)
        model.decoder.tie_weights()
        save_vision_language(partial, config, model, self.folder, created_by)


def _vision_of(vision: ViTConfig, shapes: Shapes) -> ViTConfig:
    """The transformer whose tensors have `shapes`."""
    head_dim = vision.attention_size // vision.num_attention_heads
    layers = [f"{_LAYERS}{layer}." for layer in range(vision.num_hidden_layers)]
    inner = tuple(shapes[layer + EYES["vision_ffn"]][0] for layer in layers)
    heads = {shapes[layer + EYES["vision_heads"]][0] // head_dim for layer in layers}
    if len(heads) > 1:
        raise ConfigError(f"layers of a vision transformer have as many heads each; these would have {sorted(heads)}")
    (count,) = heads
    even = len(set(inner)) == 1
    changed = {
        "intermediate_size": max(inner),
        "intermediate_sizes": None if even else inner,
        "num_attention_heads": count,
        "head_dim": None if count * head_dim == vision.hidden_size else head_dim,
    }
    return ViTConfig.model_validate(vision.model_dump() | changed)


def _short(group: Group) -> Group:
    """With the names that the tensors of the decoder have in it alone."""
    return Group(tuple(Place(place.tensor.removeprefix(_DECODER), place.dim) for place in group.places), group.units)


def _is(part: str, group: Group) -> bool:
    return any(
        place.dim == 0 and place.tensor.startswith(_LAYERS) and place.tensor.endswith(EYES[part])
        for place in group.places
    )
