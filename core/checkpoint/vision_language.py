"""Checkpoint folders of decoders that see, in Hugging Face's layout of Idefics3, which SmolVLM's is by another name:
`config.json`, safetensors, tokenizer files, `preprocessor_config.json`, `penjing.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.checkpoint.named import named_tensors
from penjing.core.checkpoint.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import SEEING
from penjing.core.files import atomic_write_text
from penjing.core.images.processor import PREPROCESSOR, filter_of, read_preprocessor, resample
from penjing.core.manifest import MANIFEST_NAME, read_json_object, verify, write_manifest
from penjing.core.models.hf_config import decoder_config_from_hf, decoder_config_to_hf
from penjing.core.vision.vision_language import VisionLanguage, VisionLanguageConfig

_NAMES = {
    "vision.": "model.vision_model.",
    "projector.": "model.connector.modality_projection.proj.",
    "decoder.model.": "model.text_model.",
    "decoder.lm_head.": "lm_head.",
}
_ACTIVATION = "gelu_pytorch_tanh"
# What Hugging Face's classes take where config.json leaves a field out.
_VISION = {
    "image_size": 224, "patch_size": 32, "num_channels": 3, "hidden_size": 1152, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 16, "layer_norm_eps": 1e-6,
}  # fmt: skip
PIXELS = {"mean": 0.5, "std": 0.5}
"""An image enters as (pixel / 255 - mean) / std, each channel alike, as SigLIP's do."""


def idefics3_name(name: str) -> str:
    """The name that Hugging Face gives to the parameter `name` of a `VisionLanguage`."""
    ours = next(prefix for prefix in _NAMES if name.startswith(prefix))
    return _NAMES[ours] + name.removeprefix(ours)


def vision_language_config(folder: Path) -> VisionLanguageConfig:
    """The content of `config.json`.

    Raises:
        InputError: missing, damaged, of another kind, or of a computation that `VisionLanguage` does not do.
    """
    path = folder / "config.json"
    values = read_json_object(path)
    if values.get("model_type") not in SEEING:
        raise InputError(
            f"{folder} is no decoder that sees: its config.json has model_type {values.get('model_type')!r}"
        )
    text, vision = values.get("text_config"), values.get("vision_config")
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise InputError(f"{path} needs the objects text_config and vision_config; get the model again")
    if (activation := vision.get("hidden_act", _ACTIVATION)) != _ACTIVATION:
        raise InputError(
            f"{path}: vision_config.hidden_act={activation!r} is not supported; it must be {_ACTIVATION!r}"
        )
    text = {"tie_word_embeddings": values.get("tie_word_embeddings", False)} | text
    try:
        chosen = {
            "vision": {name: vision.get(name, default) for name, default in _VISION.items()},
            "decoder": decoder_config_from_hf(text, str(path)).model_dump(),
            "scale_factor": values.get("scale_factor", 2),
            "image_token_id": values.get("image_token_id", 128257),
            "look": _look(folder, vision.get("image_size", _VISION["image_size"])),
        }
        return parse_config(VisionLanguageConfig, chosen, str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged, or of another kind of model") from None


def _look(folder: Path, side: object) -> dict[str, Any]:
    """How images become the input, by `preprocessor_config.json`; a folder without one sees whole images.

    Raises:
        InputError: it asks for what `Look` cannot say.
    """
    found = read_preprocessor(folder)
    if found is None:
        return {}
    path, values = found
    for name, ours in (("image_mean", PIXELS["mean"]), ("image_std", PIXELS["std"])):
        said = values.get(name, [ours])
        if not isinstance(said, list) or any(each != ours for each in said):
            raise InputError(f"{path}: {name}={said!r:.60} is not supported; each channel must have {ours}")
    look: dict[str, Any] = {"filter": filter_of(path, values, "lanczos")}
    if not values.get("do_image_splitting", True):
        return look
    longest, square = (_longest_edge(values.get(name)) for name in ("size", "max_image_size"))
    if longest is None or square != side:
        raise InputError(
            f"{path}: images are cut into squares of {square} pixels a side, scaled to {longest}; the network's have "
            f"{side}: max_image_size.longest_edge must be that, and size.longest_edge a number"
        )
    return {**look, "tiles": longest}


def _longest_edge(value: object) -> int | None:
    edge = value.get("longest_edge") if isinstance(value, dict) else None
    return edge if type(edge) is int and edge > 0 else None


def save_vision_language(
    folder: Path,
    config: VisionLanguageConfig,
    model: nn.Module,
    tokenizer_from: Path,
    created_by: dict[str, Any],
    *,
    tokenizer: str | None = None,
    template: str | None = None,
) -> None:
    """Fill `folder`, not yet published (see `publish_folder`); transformers reads it too.

    Args:
        tokenizer: content of tokenizer.json in place of that of `tokenizer_from`; `template`: of chat_template.jinja.
    """
    values = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": SEEING[0],
        "image_token_id": config.image_token_id,
        "scale_factor": config.scale_factor,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
        "text_config": decoder_config_to_hf(config.decoder),
        "vision_config": {"model_type": "idefics3_vision", "hidden_act": _ACTIVATION, **config.vision.model_dump()},
    }
    atomic_write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    pixels = {
        "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": bool(config.look.tiles),
        "do_normalize": True,
        "image_mean": [PIXELS["mean"]] * config.vision.num_channels,
        "image_std": [PIXELS["std"]] * config.vision.num_channels,
        "max_image_size": {"longest_edge": config.vision.image_size},
        "size": {"longest_edge": config.look.tiles or config.vision.image_size},
        "resample": resample(config.look.filter),
    }  # fmt: skip
    atomic_write_text(folder / PREPROCESSOR, json.dumps(pixels, indent=2) + "\n")
    copy_tokenizer(tokenizer_from, folder)
    for name, content in (("tokenizer.json", tokenizer), ("chat_template.jinja", template)):
        if content is not None:
            atomic_write_text(folder / name, content)
    with SafetensorsWriter(folder, MAX_SHARD_BYTES) as writer:
        for name, tensor in model.named_parameters():  # a tied head comes once, as the embedding
            writer.add(idefics3_name(name), tensor.detach().cpu().contiguous())
    write_manifest(folder, "checkpoint", created_by)


def load_vision_language(folder: Path) -> VisionLanguage:
    """The model in float32 on the CPU, in evaluation mode; hashes are checked where there is a manifest.

    Raises:
        InputError: missing, damaged, not finite, or with other tensors than `config.json` promises.
    """
    config = vision_language_config(folder)
    if (folder / MANIFEST_NAME).exists():
        verify(folder)
    model = VisionLanguage(config)
    wanted = {idefics3_name(name): parameter for name, parameter in model.named_parameters()}
    shapes = {name: parameter.shape for name, parameter in wanted.items()}
    with torch.no_grad():
        for name, tensor in named_tensors(folder, shapes, unused=("lm_head.weight",)):  # some store a tied head too
            wanted[name].copy_(tensor)
    return model.eval()
