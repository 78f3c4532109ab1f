"""Torch modules by name: a function of the user's file, or networks of timm, torchvision and transformers."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penjing.core.errors import InputError, SetupError, first_line
from penjing.core.graph.compare import float32_of
from penjing.core.graph.config import Filter, Fit, Meaning, Pixels
from penjing.core.imports.user_code import named_errors, user_function
from penjing.core.text.text_tokenizer import TOKENIZER

LENGTH = 16  # tokens of an example
_FITS: dict[str, Fit] = {"border": "border", "squash": "stretch"}  # timm's words for them


@dataclass(frozen=True)
class Found:
    """A module with inputs that show it, and what is known of it."""

    module: nn.Module
    example: tuple[Any, ...] = ()
    keyword: Mapping[str, Any] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    meaning: Meaning = "tensors"
    labels: Sequence[str] = ()
    pixels: Pixels | None = None
    tokenizer: Path | None = None

    def in_float32(self) -> Found:
        """The same, all of whose floating numbers are float32."""
        example, keyword = pytree.tree_map(float32_of, (tuple(self.example), dict(self.keyword)))
        return replace(self, module=self.module.float(), example=example, keyword=keyword)


def from_function(source: str) -> Found:
    """What `file.py:function` returns: a module, or (module, example inputs: a tensor, a tuple, or a dict by name).

    Raises:
        InputError: the file or the function is missing, raises, or returns something else.
    """
    function = user_function(source)
    with named_errors(source):
        made = function()
    network, example = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not isinstance(network, nn.Module):
        raise InputError(f"{source} returned a {type(network).__name__}; return a torch module, or (module, example)")
    if isinstance(example, Mapping):
        return Found(network, keyword=dict(example))
    if not isinstance(example, Tensor | tuple | list):
        raise InputError(
            f"{source} returned a {type(example).__name__} as its example; return (module, example), where that is a "
            "tensor, a tuple of the inputs, or a dict of them by name"
        )
    return Found(network, (example,) if isinstance(example, Tensor) else tuple(example))


def from_package(source: str) -> Found:
    """`timm/NAME`, `torchvision/NAME` or `transformers/NAME`, without any download.

    Raises:
        SetupError: the package is not installed.
        InputError: it has no such network.
    """
    package, _, name = source.partition("/")
    try:
        library = importlib.import_module(package)
    except ImportError as error:
        raise SetupError(
            f"{source}: {package} cannot be imported ({error}); install it with 'pip install {package}'"
        ) from None
    except RuntimeError as error:  # compiled operators of torchvision that this torch does not load
        raise SetupError(
            f"{source}: {package} cannot be imported beside torch {torch.__version__} ({first_line(error)}); install "
            "the torchvision that was built for this torch, from the same index"
        ) from None
    return {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}[package](library, name)


def _timm(timm: Any, name: str) -> Found:
    try:
        model = timm.create_model(name, pretrained=False)
        data = timm.data.resolve_model_data_config(model)
    except Exception as error:
        raise InputError(
            f"timm has no network {name!r} ({first_line(error)}); {_near(name, timm.list_models())}see "
            "timm.list_models()"
        ) from None
    channels, height, width = data["input_size"]
    pixels = _timm_pixels(data, height, width) if channels == 3 else None
    labels: list[str] = []
    classes = getattr(model, "num_classes", 0)
    if classes == 1000:
        info = timm.data.ImageNetInfo("imagenet-1k")
        labels = [info.index_to_description(index) for index in range(classes)]
    example = (torch.randn(2, channels, height, width),)
    return Found(model, example, meaning="classes" if classes else "embedding", labels=labels, pixels=pixels)


def _torchvision(torchvision: Any, name: str) -> Found:
    models = torchvision.models
    try:
        model = models.get_model(name, weights=None)
        weights = models.get_model_weights(name)
    except Exception as error:
        raise InputError(
            f"torchvision has no network {name!r} ({first_line(error)}); {_near(name, models.list_models())}see "
            "torchvision.models.list_models()"
        ) from None
    chosen = next(iter(weights), None)
    if chosen is None:
        return Found(model, (torch.randn(2, 3, 224, 224),))
    preset, labels = chosen.transforms(), chosen.meta.get("categories") or []
    size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None) or [224]
    height, width = size[0], size[-1]
    pixels = _torchvision_pixels(preset, height, width) if hasattr(preset, "mean") else None
    classifies = not hasattr(model, "roi_heads") and type(preset).__name__ == "ImageClassification"
    example = (torch.randn(2, 3, height, width),)
    return Found(
        model,
        example,
        meaning="classes" if classifies else "tensors",
        labels=labels if classifies else [],
        pixels=pixels,
    )


def _timm_pixels(data: Mapping[str, Any], height: int, width: int) -> Pixels:
    """What timm's transforms of an evaluation do: which part of an image is kept, and how its shape is treated."""
    share = float(data.get("crop_pct") or 1)
    mode = data.get("crop_mode") or "center"
    return Pixels(
        height=height,
        width=width,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        fit=_FITS.get(mode, "cover"),
        resize=(math.floor(height / share), math.floor(width / share)),
        filter=_filter(data.get("interpolation")),
    )


def _torchvision_pixels(preset: Any, height: int, width: int) -> Pixels:
    crops = getattr(preset, "crop_size", None) is not None
    resize = list(getattr(preset, "resize_size", None) or [height, width])
    filter_ = getattr(preset, "interpolation", None)
    return Pixels(
        height=height,
        width=width,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
        fit="cover" if crops else "stretch",
        resize=(max(resize[0], height), max(resize[-1], width)) if crops else None,
        filter=_filter(getattr(filter_, "value", filter_)),
    )


def _filter(name: Any) -> Filter:
    return name if name in ("bicubic", "lanczos") else "bilinear"


def _transformers(transformers: Any, name: str) -> Found:
    """A local folder (with its weights and tokenizer), a class (`ViTForImageClassification`) or a type (`bert`)."""
    tokenizer = None
    try:
        if Path(name).expanduser().is_dir():
            folder = Path(name).expanduser()
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            kind = getattr(transformers, (getattr(config, "architectures", None) or ["AutoModel"])[0])
            weighted = any(folder.glob("*.safetensors"))
            tokenizer = folder / TOKENIZER if (folder / TOKENIZER).is_file() else None
            model = (
                kind.from_pretrained(folder, local_files_only=True, use_safetensors=True) if weighted else kind(config)
            )
        elif isinstance(kind := getattr(transformers, name, None), type):
            model = kind(kind.config_class())
        else:
            config = transformers.AutoConfig.for_model(name)
            model = transformers.AutoModel.from_config(config)
    except Exception as error:
        raise InputError(
            f"transformers has no network {name!r} ({first_line(error)}); give a local folder, a class such as "
            "ViTForImageClassification, or a type such as bert"
        ) from None
    config = model.config
    config.use_cache = False
    config.return_dict = True
    return replace(_shown(model.eval(), config), tokenizer=tokenizer)


def _shown(model: Any, config: Any) -> Found:
    main = getattr(model, "main_input_name", "input_ids")
    classes = type(model).__name__.endswith("Classification") and "Token" not in type(model).__name__
    meaning: Meaning = "classes" if classes else "tensors"
    labels = [config.id2label[index] for index in sorted(config.id2label)] if classes else []
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        example = torch.randn(2, getattr(vision, "num_channels", 3), height, width)
        return Found(model, keyword={main: example}, meaning=meaning, labels=labels)
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 1500)
        return Found(model, keyword={main: torch.randn(2, getattr(config, "num_mel_bins", 80), frames)})
    if main == "input_values":
        return Found(model, keyword={main: torch.randn(2, 16000)}, meaning=meaning, labels=labels)
    tokens = torch.randint(10, (2, LENGTH))
    keyword = {"input_ids": tokens}
    if not getattr(config, "is_encoder_decoder", False):
        keyword["attention_mask"] = torch.ones_like(tokens)
    else:
        keyword["decoder_input_ids"] = torch.randint(10, (2, LENGTH))
    dynamic = {key: {0: "batch", 1: "decoder_length" if key.startswith("dec") else "length"} for key in keyword}
    return Found(model, keyword=keyword, dynamic=dynamic, meaning=meaning, labels=labels)


def _near(name: str, names: Sequence[str]) -> str:
    near = [known for known in names if known.startswith(name)][:3] or difflib.get_close_matches(name, names)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""
