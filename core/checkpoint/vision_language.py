"""Checkpoint folders of decoders that see, in Hugging Face's layouts of Idefics3, which SmolVLM's is by another name,
and of LLaVA, or in penjing's own where these cannot hold one: `config.json`, safetensors, tokenizer files,
`preprocessor_config.json`, `penjing.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.checkpoint.named import named_tensors, stored_names
from penjing.core.checkpoint.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import OWN_SEEING, SEEING
from penjing.core.files import atomic_write_text
from penjing.core.images.processor import (
    PREPROCESSOR,
    filter_of,
    read_pixels,
    read_preprocessor,
    resample,
    written_pixels,
)
from penjing.core.manifest import MANIFEST_NAME, read_json_object, verify, write_manifest
from penjing.core.models.hf_config import decoder_config_from_hf, decoder_config_to_hf
from penjing.core.vision.graph_eyes import GraphEyesConfig
from penjing.core.vision.layout import Names, names_found, names_written, text_config
from penjing.core.vision.sight import HALF, pixels_of
from penjing.core.vision.vision_language import VisionLanguage, VisionLanguageConfig
from penjing.core.vision.vit import ACTIVATIONS, ViTConfig

# What Hugging Face's classes take where config.json leaves a field out.
_VISION: dict[str, dict[str, Any]] = {
    "idefics3": {
        "image_size": 224, "patch_size": 32, "num_channels": 3, "hidden_size": 1152, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    },
    "clip_vision_model": {
        "image_size": 224, "patch_size": 32, "num_channels": 3, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu",
    },
    "siglip_vision_model": {
        "image_size": 224, "patch_size": 16, "num_channels": 3, "hidden_size": 768, "intermediate_size": 3072,
        "num_hidden_layers": 12, "num_attention_heads": 12, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
    },
}  # fmt: skip
_SOUND = "penjing_sound"  # of preprocessor_config.json, where what enters is a recording
_ARCHITECTURES = {"idefics3": "Idefics3ForConditionalGeneration", "llava": "LlavaForConditionalGeneration"}


def layout_of(config: VisionLanguageConfig) -> str:
    """The `model_type` of the folders that hold such a model: Hugging Face's where there is one, or else our own."""
    vision, projector = config.vision, config.projector
    if isinstance(vision, GraphEyesConfig) or vision.head_dim or vision.intermediate_sizes:
        return OWN_SEEING
    if vision.last_norm and not vision.class_token and projector.kind == "linear" and not projector.bias:
        return "idefics3"
    if not vision.last_norm and projector.kind == "mlp" and config.scale_factor == 1:
        return "llava"
    return OWN_SEEING


def vision_language_config(folder: Path) -> VisionLanguageConfig:
    """The content of `config.json`.

    Raises:
        InputError: missing, damaged, of another kind, or of a computation that `VisionLanguage` does not do.
    """
    path = folder / "config.json"
    values = read_json_object(path)
    kind = values.get("model_type")
    if kind not in SEEING:
        raise InputError(f"{folder} is no decoder that sees: its config.json has model_type {kind!r}")
    text, vision = text_config(values, str(path)), values.get("vision_config")
    if kind == OWN_SEEING:
        own = values.get("penjing")
        try:
            decoder = decoder_config_from_hf(text, str(path)).model_dump()
            parts = {**own, "decoder": decoder} if isinstance(own, dict) else {"decoder": decoder}
            return parse_config(VisionLanguageConfig, parts, str(path))
        except ConfigError as error:
            raise InputError(f"{error}; the file is damaged: make it again") from None
    if not isinstance(vision, dict):
        raise InputError(f"{path} needs the objects text_config and vision_config; get the model again")
    tower = vision.get("model_type", "clip_vision_model") if kind == "llava" else "idefics3"
    if tower not in tuple(_VISION):  # a list, which a damaged file may hold, has no hash
        known = " and ".join(name for name in _VISION if name != "idefics3")
        raise InputError(f"{path}: the vision tower {tower!r:.60} is not supported; {known} are")
    seen = _VISION[tower] | vision
    if (activation := seen["hidden_act"]) not in tuple(ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise InputError(f"{path}: vision_config.hidden_act={activation!r} is not supported; it must be one of {known}")
    try:
        chosen: dict[str, Any] = {
            "vision": {name: seen[name] for name in _VISION[tower] if name != "hidden_act"}
            | {"activation": activation},
            "decoder": decoder_config_from_hf(text, str(path)).model_dump(),
        }
        if kind == "llava":
            chosen |= _llava(folder, values, seen, chosen["vision"])
        else:
            chosen |= {
                "scale_factor": values.get("scale_factor", 2),
                "image_token_id": values.get("image_token_id", 128257),
                "look": _look(folder, seen["image_size"]),
            }
        return parse_config(VisionLanguageConfig, chosen, str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged, or of another kind of model") from None


def _llava(folder: Path, values: dict[str, Any], seen: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    """What LLaVA's folder says beside widths; `vision` gets what of the tower is used.

    Raises:
        InputError: a layer, a token or a projector that is not there, or not supported.
    """
    path, has_class = folder / "config.json", seen.get("model_type", "clip_vision_model") == "clip_vision_model"
    layers, asked = seen["num_hidden_layers"], values.get("vision_feature_layer", -2)
    if type(asked) is not int or type(layers) is not int:
        raise InputError(f"{path}: vision_feature_layer={asked!r:.60} is not supported; it must be one layer")
    used = asked if asked >= 0 else layers + 1 + asked
    if not 0 < used <= layers:
        raise InputError(f"{path}: vision_feature_layer={asked} is none of the {layers} layers of the vision tower")
    # The class token is left out; a tower that has none has nothing to leave out.
    wanted = "default" if has_class else "full"
    if (strategy := values.get("vision_feature_select_strategy", "default")) != wanted:
        raise InputError(
            f"{path}: vision_feature_select_strategy={strategy!r:.60} is not supported with this tower; it must be "
            f"{wanted!r}"
        )
    if (curve := values.get("projector_hidden_act", "gelu")) not in tuple(ACTIVATIONS):
        raise InputError(
            f"{path}: projector_hidden_act={curve!r:.60} is not supported; it must be one of "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    vision |= {"num_hidden_layers": used, "class_token": has_class, "last_norm": False}
    pixels = read_pixels(folder, seen["image_size"], seen["num_channels"])
    token = values.get("image_token_index", values.get("image_token_id", 32000))
    bias = values.get("multimodal_projector_bias", True)
    return {
        "scale_factor": 1, "projector": {"kind": "mlp", "bias": bias, "activation": curve}, "image_token_id": token,
        "look": {name: getattr(pixels, name) for name in ("mean", "std", "fit", "resize", "filter")},
    }  # fmt: skip


def _look(folder: Path, side: object) -> dict[str, Any]:
    """How images become the input, by `preprocessor_config.json`; a folder without one sees whole images.

    Raises:
        InputError: it asks for what `Look` cannot say.
    """
    found = read_preprocessor(folder)
    if found is None:
        return {}
    path, values = found
    for name in ("image_mean", "image_std"):
        said = values.get(name, [HALF])
        if not isinstance(said, list) or any(each != HALF for each in said):
            raise InputError(f"{path}: {name}={said!r:.60} is not supported; each channel must have {HALF}")
    look: dict[str, Any] = {"filter": filter_of(path, values, "lanczos"), "sound": values.get(_SOUND)}
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
    kind = layout_of(config)
    values = {
        "architectures": [_ARCHITECTURES.get(kind, "PenjingVisionLanguage")],
        "model_type": kind,
        "tie_word_embeddings": config.decoder.tie_word_embeddings,
        "text_config": decoder_config_to_hf(config.decoder),
        **_VALUES[kind](config),
    }
    atomic_write_text(folder / "config.json", json.dumps(values, indent=2) + "\n")
    if kind in _SEEN:
        atomic_write_text(folder / PREPROCESSOR, json.dumps(_SEEN[kind](config), indent=2) + "\n")
    copy_tokenizer(tokenizer_from, folder)
    for name, content in (("tokenizer.json", tokenizer), ("chat_template.jinja", template)):
        if content is not None:
            atomic_write_text(folder / name, content)
    with SafetensorsWriter(folder, MAX_SHARD_BYTES) as writer:
        for name, tensor in _stored(model):
            writer.add(names_written(kind).stored(name), tensor.detach().cpu().contiguous())
        if kind == "llava":  # transformers has the norm, and reads what comes before it
            for name, fill in (("weight", torch.ones), ("bias", torch.zeros)):
                writer.add(names_written(kind).stored(f"vision.post_layernorm.{name}"), fill(config.vision.hidden_size))
    write_manifest(folder, "checkpoint", created_by)


def _stored(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, of which a tied head comes once, as the embedding, and the buffers of an encoder that is a graph."""
    yield from model.named_parameters()
    yield from ((name, tensor) for name, tensor in model.named_buffers() if name.startswith("vision.graph."))


def _own_values(config: VisionLanguageConfig) -> dict[str, Any]:
    return {"penjing": config.model_dump(exclude={"decoder"})}


def _sizes(config: VisionLanguageConfig) -> dict[str, Any]:
    assert isinstance(config.vision, ViTConfig), "what Hugging Face's layouts hold"
    own = {"activation", "class_token", "last_norm", "head_dim", "intermediate_sizes"}
    values = config.vision.model_dump(exclude=own)
    return {**values, "hidden_act": config.vision.activation}


def _idefics3_values(config: VisionLanguageConfig) -> dict[str, Any]:
    return {
        "image_token_id": config.image_token_id,
        "scale_factor": config.scale_factor,
        "vision_config": {"model_type": "idefics3_vision", **_sizes(config)},
    }


def _idefics3_seen(config: VisionLanguageConfig) -> dict[str, Any]:
    pixels = pixels_of(config)
    sound = {} if config.look.sound is None else {_SOUND: config.look.sound.model_dump()}
    return {
        **sound, "image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": bool(config.look.tiles),
        "do_normalize": True, "image_mean": list(pixels.mean), "image_std": list(pixels.std),
        "max_image_size": {"longest_edge": config.vision.image_size},
        "size": {"longest_edge": config.look.tiles or config.vision.image_size},
        "resample": resample(config.look.filter),
    }  # fmt: skip


def _llava_values(config: VisionLanguageConfig) -> dict[str, Any]:
    assert isinstance(config.vision, ViTConfig), "what Hugging Face's layouts hold"
    has_class = config.vision.class_token
    tower = {"model_type": "clip_vision_model"} if has_class else {"model_type": "siglip_vision_model"}
    return {
        "image_token_index": config.image_token_id,
        "image_seq_length": config.rows,
        "projector_hidden_act": config.projector.activation,
        "multimodal_projector_bias": config.projector.bias,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default" if has_class else "full",
        "vision_config": {**tower, **({} if has_class else {"vision_use_head": False}), **_sizes(config)},
    }


def _llava_seen(config: VisionLanguageConfig) -> dict[str, Any]:
    assert isinstance(config.vision, ViTConfig), "what Hugging Face's layouts hold"
    kind = "CLIPImageProcessor" if config.vision.class_token else "SiglipImageProcessor"
    return {**written_pixels(pixels_of(config)), "image_processor_type": kind}


_VALUES = {"idefics3": _idefics3_values, "llava": _llava_values, OWN_SEEING: _own_values}
_SEEN = {"idefics3": _idefics3_seen, "llava": _llava_seen}


def load_vision_language(folder: Path) -> VisionLanguage:
    """The model in float32 on the CPU, in evaluation mode; hashes are checked where there is a manifest.

    Raises:
        InputError: missing, damaged, not finite, or with other tensors than `config.json` promises.
    """
    config = vision_language_config(folder)
    if (folder / MANIFEST_NAME).exists():
        verify(folder)
    model = VisionLanguage(config)
    kind = str(read_json_object(folder / "config.json")["model_type"])
    names = names_found(kind, stored_names(folder))
    wanted = {names.stored(name): tensor for name, tensor in _stored(model)}
    shapes = {name: parameter.shape for name, parameter in wanted.items()}
    integers = {name: tensor.dtype for name, tensor in wanted.items() if not tensor.is_floating_point()}
    with torch.no_grad():
        for name, tensor in named_tensors(folder, shapes, _unused(folder, names, config), integers):
            wanted[name].copy_(tensor)
    return model.eval()


def _unused(folder: Path, names: Names, config: VisionLanguageConfig) -> tuple[str, ...]:
    """Tensors that a folder may have beside those of the model: a tied head, and of a vision tower whose last layers
    are not looked at these, what stands behind them, and the numbers of the positions."""
    head = f"{names.head}weight"
    if not isinstance(config.vision, ViTConfig) or config.vision.last_norm:
        return (head,)
    stored = read_json_object(folder / "config.json").get("vision_config", {})
    layers = stored.get("num_hidden_layers", config.vision.num_hidden_layers)
    behind = range(config.vision.num_hidden_layers, layers if type(layers) is int else 0)
    parts = ("post_layernorm.", "head.", "embeddings.position_ids", *(f"encoder.layers.{each}." for each in behind))
    return (head, *(f"{names.vision}{part}" for part in parts))
