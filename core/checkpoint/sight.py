"""The eyes of a decoder's artifact, in a folder of their own inside it: `sight/config.json`, `sight/model.safetensors`.

Linear layers in INT8 are stored as the decoder's are: `X.weight` (int8), `X.weight_scale` and `X.bias`.

Loaders of other programs take each safetensors file beside `config.json` for weights of the decoder; they load the
artifact as one that reads text alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import EYES
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object
from penjing.core.models.config import DecoderConfig
from penjing.core.runtime.batch_invariant import apply_image_invariance
from penjing.core.runtime.quantized import apply_quantized
from penjing.core.runtime.schemes import INT8, INT8_ABOVE, Scheme
from penjing.core.vision.projector import build_projector
from penjing.core.vision.sight import Sight, SightConfig, is_above
from penjing.core.vision.vision_language import build_encoder

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def save_sight(folder: Path, sight: Sight, integers: Mapping[str, Tensor] | None = None) -> None:
    """Write the eyes into an artifact's folder, which is not yet published and gets its manifest afterwards.

    Args:
        integers: of each linear layer, where they run in INT8, the tensors at the head of this file.
    """
    place = folder / EYES
    place.mkdir()
    config = sight.config.model_copy(update={"linears": "float32" if integers is None else "int8"})
    atomic_write_text(place / _CONFIG, config.model_dump_json(indent=2) + "\n")
    stored = sight.state_dict() | dict(integers or {})
    save_tensors({name: tensor.detach().contiguous() for name, tensor in stored.items()}, place / _WEIGHTS)


def read_sight_config(folder: Path) -> SightConfig:
    """The configuration of the eyes in the folder of a decoder.

    Raises:
        InputError: missing or damaged.
    """
    path = folder / EYES / _CONFIG
    try:
        return parse_config(SightConfig, read_json_object(path), str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: make the artifact again") from None


def load_sight(folder: Path, decoder: DecoderConfig) -> Sight | None:
    """The eyes in the folder of a decoder, in float32 and, where they are stored so, INT8; None where it has none.
    Hashes are the caller's matter.

    Raises:
        InputError: damaged, or of another decoder.
    """
    place = folder / EYES
    if not place.exists():
        return None
    config = read_sight_config(folder)
    if config.width != decoder.hidden_size or config.image_token_id >= decoder.vocab_size:
        raise InputError(
            f"{place} gives rows of {config.width} numbers for the token {config.image_token_id}; the decoder beside "
            f"it has {decoder.hidden_size} and {decoder.vocab_size} tokens: make the artifact again"
        )
    inner = config.vision.hidden_size * config.scale_factor**2
    sight = Sight(config, build_encoder(config.vision), build_projector(config.projector, inner, config.width))
    try:
        stored = load_file(place / _WEIGHTS)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{place / _WEIGHTS} cannot be read ({error}); make the artifact again") from error
    schemes = _schemes(sight) if config.linears == "int8" else {}
    wanted = {name: tensor.shape for name, tensor in sight.state_dict().items()}
    wanted |= {f"{name}.weight_scale": torch.Size([wanted[f"{name}.weight"][0], 1]) for name in schemes}
    for name in sorted(wanted.keys() | stored.keys()):
        tensor, integer = stored.get(name), name.removesuffix(".weight") in schemes
        fits = tensor is not None and tensor.shape == wanted.get(name) and tensor.is_floating_point() is not integer
        if tensor is None or not fits or not bool(tensor.isfinite().all()):
            raise InputError(f"{place / _WEIGHTS}: {name:.100} does not fit the config; make the artifact again")
    apply_quantized(sight, schemes, stored.__getitem__)
    sight.load_state_dict({name: stored[name].to(torch.float32) for name in sight.state_dict()})
    apply_image_invariance(sight)
    return sight.requires_grad_(False).eval()


def _schemes(sight: Sight) -> dict[str, Scheme]:
    names = [name for name, module in sight.named_modules() if isinstance(module, nn.Linear)]
    return {name: INT8_ABOVE if is_above(name) else INT8 for name in names}
