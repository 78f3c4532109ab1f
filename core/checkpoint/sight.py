"""The eyes of a decoder's artifact, in a folder of their own inside it: `sight/config.json`, `sight/model.safetensors`.

Loaders of other programs take each safetensors file beside `config.json` for weights of the decoder; they load the
artifact as one that reads text alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import EYES
from penjing.core.files import atomic_write_text
from penjing.core.manifest import read_json_object
from penjing.core.models.config import DecoderConfig
from penjing.core.vision.sight import Sight, SightConfig
from penjing.core.vision.vit import VisionTransformer

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def save_sight(folder: Path, sight: Sight) -> None:
    """Write the eyes into an artifact's folder, which is not yet published and gets its manifest afterwards."""
    place = folder / EYES
    place.mkdir()
    atomic_write_text(place / _CONFIG, sight.config.model_dump_json(indent=2) + "\n")
    save_tensors({name: tensor.detach().contiguous() for name, tensor in sight.state_dict().items()}, place / _WEIGHTS)


def load_sight(folder: Path, decoder: DecoderConfig) -> Sight | None:
    """The eyes in the folder of a decoder, in float32; None where it has none. Hashes are the caller's matter.

    Raises:
        InputError: damaged, or of another decoder.
    """
    place = folder / EYES
    if not place.exists():
        return None
    try:
        config = parse_config(SightConfig, read_json_object(place / _CONFIG), str(place / _CONFIG))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: make the artifact again") from None
    if config.width != decoder.hidden_size or config.image_token_id >= decoder.vocab_size:
        raise InputError(
            f"{place} gives rows of {config.width} numbers for the token {config.image_token_id}; the decoder beside "
            f"it has {decoder.hidden_size} and {decoder.vocab_size} tokens: make the artifact again"
        )
    inner = config.vision.hidden_size * config.scale_factor**2
    sight = Sight(config, VisionTransformer(config.vision), nn.Linear(inner, config.width, bias=False))
    try:
        stored = load_file(place / _WEIGHTS)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{place / _WEIGHTS} cannot be read ({error}); make the artifact again") from error
    wanted = {name: tensor.shape for name, tensor in sight.state_dict().items()}
    for name in sorted(wanted.keys() | stored.keys()):
        tensor = stored.get(name)
        if tensor is None or tensor.shape != wanted.get(name) or not bool(tensor.isfinite().all()):
            raise InputError(f"{place / _WEIGHTS}: {name:.100} does not fit the config; make the artifact again")
    sight.load_state_dict({name: tensor.to(torch.float32) for name, tensor in stored.items()})
    return sight.requires_grad_(False).eval()
