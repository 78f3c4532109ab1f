"""Networks with random weights that everybody knows, at sizes that run in a second, with inputs that show them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]
TOKENS, VOCABULARY = 16, 64
_LIBRARIES: list[torch.library.Library] = []

TORCHVISION = {  # name → size of an image
    "alexnet": 96, "squeezenet1_1": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64,
    "mnasnet0_5": 64, "shufflenet_v2_x0_5": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64,
    "regnet_y_400mf": 64, "resnet18": 64, "resnext50_32x4d": 64, "densenet121": 64,
    "googlenet": 64, "inception_v3": 96, "convnext_tiny": 64, "vit_b_16": 224, "swin_t": 64, "swin_v2_t": 64,
    "maxvit_t": 224,
}  # fmt: skip
TIMM = {
    "mobilenetv3_small_050": 64, "efficientnet_lite0": 64, "seresnet18": 64, "ghostnet_050": 64, "repvgg_a0": 64,
    "deit_tiny_patch16_224": 224, "swin_tiny_patch4_window7_224": 224, "mobilevit_xxs": 64, "convnextv2_atto": 64,
    "mixer_s32_224": 224, "resmlp_12_224": 224, "poolformer_s12": 64, "levit_128s": 224, "efficientformer_l1": 224,
    "hrnet_w18_small": 64, "dla34": 64, "cspresnet50": 64, "res2net50_26w_4s": 64, "ecaresnet26t": 64,
    "xcit_nano_12_p16_224": 224, "edgenext_xx_small": 64, "coatnet_nano_rw_224": 224, "vovnet39a": 64,
}  # fmt: skip


def torchvision_operators(site: Path) -> None:
    """Make torchvision and timm of `site` importable beside a torch that PyPI's wheel of torchvision was not built for:
    the two operators that its Python half looks for are declared here, and never called."""
    sys.path.append(str(site))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def architectures() -> dict[str, Callable[[], Made]]:
    """Name → how it is made, in evaluation mode, with its inputs: batches of 2."""
    found: dict[str, Callable[[], Made]] = {}
    for name, size in TORCHVISION.items():
        found[f"torchvision/{name}"] = lambda name=name, size=size: (
            _torchvision(name),
            (torch.randn(2, 3, size, size),),
        )
    for name, size in TIMM.items():
        found[f"timm/{name}"] = lambda name=name, size=size: (_timm(name), (torch.randn(2, 3, size, size),))
    for name in _TRANSFORMERS:
        found[f"transformers/{name}"] = lambda name=name: _transformer(name)
    return found


def _torchvision(name: str) -> nn.Module:
    models = importlib.import_module("torchvision.models")
    more = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return getattr(models, name)(weights=None, **more).eval()


def _timm(name: str) -> nn.Module:
    return importlib.import_module("timm").create_model(name, pretrained=False).eval()


def _ids() -> Tensor:
    return torch.randint(2, VOCABULARY, (2, TOKENS))


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96,
}  # fmt: skip
PICTURE = {name: value for name, value in SMALL.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
BART = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 16,
    "max_source_positions": 32,
}  # fmt: skip
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], str]] = {  # model → class of its settings, settings, kind of input
    "BertModel": ("BertConfig", SMALL, "ids"),
    "DistilBertModel": (
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
        "ids",
    ),
    "RobertaModel": ("RobertaConfig", SMALL, "ids"),
    "AlbertModel": ("AlbertConfig", SMALL | {"embedding_size": 32}, "ids"),
    "ElectraModel": ("ElectraConfig", SMALL | {"embedding_size": 32}, "ids"),
    "MPNetModel": ("MPNetConfig", SMALL, "ids"),
    "GPT2Model": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}, "ids"),
    "OPTModel": ("OPTConfig", SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}, "ids"),
    "LlamaModel": ("LlamaConfig", SMALL | {"num_key_value_heads": 2}, "ids"),
    "T5EncoderModel": (
        "T5Config",
        {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        "ids",
    ),
    "ViTModel": ("ViTConfig", PICTURE, "image"),
    "DeiTModel": ("DeiTConfig", PICTURE, "image"),
    "SwinModel": (
        "SwinConfig",
        {
            "image_size": 32,
            "embed_dim": 32,
            "depths": (2, 2),
            "num_heads": (2, 4),
            "window_size": 4,
            "patch_size": 2,
        },
        "image",
    ),
    "SegformerModel": (
        "SegformerConfig",
        {
            "hidden_sizes": (16, 32),
            "depths": (1, 1),
            "num_encoder_blocks": 2,
            "num_attention_heads": (1, 2),
            "sr_ratios": (4, 1),
            "strides": (4, 2),
            "patch_sizes": (7, 3),
            "mlp_ratios": (2, 2),
        },
        "image",
    ),
    "CLIPVisionModel": ("CLIPVisionConfig", PICTURE, "image"),
    "CLIPTextModel": ("CLIPTextConfig", SMALL | {"max_position_embeddings": 32, "eos_token_id": 1}, "ids"),
    "WhisperEncoder": ("WhisperConfig", BART, "mel"),
}
_INPUTS: dict[str, Callable[[], Tensor]] = {
    "ids": _ids,
    "image": lambda: torch.randn(2, 3, 32, 32),
    "mel": lambda: torch.randn(2, 16, 64),
}


def _transformer(name: str) -> Made:
    transformers = importlib.import_module("transformers")
    config_name, settings, kind = _TRANSFORMERS[name]
    config = getattr(transformers, config_name)(**settings)
    owner = transformers
    if name == "WhisperEncoder":
        owner = importlib.import_module("transformers.models.whisper.modeling_whisper")
    return FirstOutput(getattr(owner, name)(config).eval()), (_INPUTS[kind](),)


class FirstOutput(nn.Module):
    """A model of transformers as a function of one tensor to one tensor."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        if hasattr(config := cast(Any, body).config, "use_cache"):
            config.use_cache = False

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]
