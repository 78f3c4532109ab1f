"""A decoder that sees, of a few thousand random parameters, in Hugging Face's layout, and pictures for it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken

from tests.serve.tiny import CONTEXT, EOS, byte_tokenizer

TOKEN, TOKEN_ID, ROWS, SIDE = "<image>", 258, 4, 16


def write_seeing(folder: Path, *, tied: bool = False, extra_tokens: tuple[str, ...] = ()) -> Any:
    """Transformers' Idefics3 with random weights and bytes as tokens, whose folder `folder` becomes."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
        "pad_token_id": 257, "bos_token_id": None, "eos_token_id": EOS, "tie_word_embeddings": tied,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": SIDE, "patch_size": 4, "initializer_range": 0.2,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=TOKEN_ID, scale_factor=2, tie_word_embeddings=tied
    )
    model = Idefics3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(each, special=True) for each in (TOKEN, *extra_tokens)])
    backend.save(str(folder / "tokenizer.json"))
    return model


def write_llava(folder: Path, tower: str = "clip_vision_model") -> Any:
    """Transformers' LLaVA with random weights, which reads the last layer but one of its tower; bytes are tokens."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    text = {
        "model_type": "llama", "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
        "pad_token_id": 257, "bos_token_id": None, "eos_token_id": EOS,
    }  # fmt: skip
    vision = {
        "model_type": tower, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 2, "image_size": SIDE, "patch_size": 8,
    }  # fmt: skip
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=TOKEN_ID,
        vision_feature_select_strategy="default" if tower == "clip_vision_model" else "full",
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(TOKEN, special=True)])
    backend.save(str(folder / "tokenizer.json"))
    pixels = {
        "image_mean": [0.4, 0.45, 0.5], "image_std": [0.2, 0.25, 0.3], "resample": 3, "size": {"shortest_edge": SIDE},
        "do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE},
        "image_processor_type": "CLIPImageProcessor",
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return model


def picture(seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    """Noise of (width, height)."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def write_asked(folder: Path, name: str, seeds: range) -> None:
    """Rows of one picture each, a question about it and its answer, in the file `name`."""
    rows = list[dict[str, Any]]()
    for seed in seeds:
        (folder / f"{seed}.png").write_bytes(encoded(picture(seed)))
        rows.append({"prompt": f"<image>what {seed}?", "completion": " a bag", "images": [f"{seed}.png"]})
    (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
