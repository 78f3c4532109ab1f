"""Small two towers with random weights: transformers' CLIP and SigLIP with letters as tokens, and our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.checkpoint.towers import save_towers
from penjing.core.vision.towers import TwoTowers
from penjing.core.vision.towers_config import TowersConfig
from penjing.train.families.classifier import resnet_config
from penjing.train.recipe.model import ResNetModel
from tests.core.models.encoders import write_sentence_transformer

Kind = Literal["clip", "siglip"]
SIDE, LONGEST, END, PAD = 16, 12, 31, 1


def write_paired(folder: Path, kind: Kind, *, end: int = END, side: int = SIDE, layers: int = 2) -> Any:
    """The model, whose folder `folder` becomes."""
    from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

    torch.manual_seed(0)
    text = {
        "vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": layers,
        "num_attention_heads": 2, "max_position_embeddings": LONGEST,
        "bos_token_id": 30, "eos_token_id": end, "pad_token_id": PAD,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4,
        "image_size": side, "patch_size": 4,
    }  # fmt: skip
    if kind == "clip":
        model: Any = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=20))
    else:
        model = SiglipModel(SiglipConfig(text_config=text | {"projection_size": 32}, vision_config=vision))
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    letters = {chr(97 + place): 2 + place for place in range(26)}
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": PAD, **letters, "<s>": 30, "</s>": 31}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 30), ("</s>", 31)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    middle = [0.4, 0.45, 0.5]
    pixels: dict[str, Any] = {"image_mean": middle, "image_std": [0.2, 0.25, 0.3], "resample": 3, "do_resize": True}
    if kind == "clip":
        pixels |= {"size": {"shortest_edge": side}, "do_center_crop": True, "crop_size": side}
        pixels |= {"image_processor_type": "CLIPImageProcessor"}
    else:
        pixels |= {"size": {"height": side, "width": side}, "image_processor_type": "SiglipImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return model


def write_resnet_towers(folder: Path) -> Path:
    """A ResNet beside a BERT, for images of 10 × 8 pixels, as `penjing train` leaves them; the checkpoint is inside."""
    text = load_encoder(write_sentence_transformer(folder / "text", layers=1))
    config = TowersConfig(
        image=resnet_config(ResNetModel(architecture="resnet", depth=8, width=4), 12, 3),
        image_size=(10, 8), mean=(0.5,) * 3, std=(0.25,) * 3, text=text.config, loss="clip",
    )  # fmt: skip
    torch.manual_seed(0)
    model = TwoTowers(config).eval()
    model.text.load_state_dict(text.state_dict())
    (folder / "made").mkdir()
    save_towers(folder / "made", model, config, folder / "text", 40, {})
    return folder / "made"
