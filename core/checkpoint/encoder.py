"""Checkpoint folders of text encoders: `config.json`, safetensors under BERT's names, `tokenizer.json`,
`sentence_bert_config.json` (the longest text), `penjing.json`. sentence-transformers and transformers read them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import InputError
from penjing.core.files import atomic_write_text
from penjing.core.manifest import MANIFEST_NAME, verify, write_manifest
from penjing.core.models.encoder import Encoder, published_name
from penjing.core.models.encoder_config import EncoderConfig, encoder_config_to_hf
from penjing.core.text.text_tokenizer import LIMITS, TOKENIZER, encoder_config

WEIGHTS = "model.safetensors"
MODULES = (
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
)
# Tensors of BERT checkpoints that no embedding depends on: an index, the head of next-sentence prediction.
UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias")


def load_encoder(folder: Path) -> Encoder:
    """The encoder of a checkpoint or of a plain Hugging Face folder, float32, on the CPU, in evaluation mode.

    Raises:
        InputError: missing, damaged, not finite, or with other tensors than `config.json` promises.
    """
    config = encoder_config(folder)
    if (folder / MANIFEST_NAME).exists():
        verify(folder)
    path = folder / WEIGHTS
    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            stored = set(file.keys())
            prefix = "bert." if any(name.startswith("bert.") for name in stored) else ""
            last = published_name(f"layers.{config.num_hidden_layers - 1}.query.weight")
            if prefix + last not in stored:  # before modules are made: a damaged count may be a billion
                raise _missing(prefix + last, path)
            with torch.device("meta"):
                model = Encoder(config)
            for name, parameter in model.named_parameters():
                tensors[name] = _read(file, stored, prefix + published_name(name), tuple(parameter.shape), path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is not a complete safetensors file ({error}); get it again") from error
    expected = {prefix + name for name in (*map(published_name, tensors), *UNUSED)}
    if extra := sorted(name for name in stored - expected if name.startswith((f"{prefix}encoder.", f"{prefix}emb"))):
        raise InputError(f"{path}: tensor {extra[0]!r} has no place in the model of its config.json")
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def save_encoder(
    folder: Path, model: Encoder, tokenizer_from: Path, max_tokens: int, created_by: dict[str, Any]
) -> None:
    """Fill `folder`, not yet published (see `publish_folder`)."""
    save_encoder_files(folder, model.config, tokenizer_from, max_tokens)
    tensors = {published_name(name): tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_manifest(folder, "checkpoint", created_by)


def save_encoder_files(folder: Path, config: EncoderConfig, tokenizer_from: Path, max_tokens: int) -> None:
    """Write what stands beside the weights: configuration, tokenizer, pooling."""
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling").mkdir()
    for name, content in (
        ("config.json", encoder_config_to_hf(config)),
        (LIMITS, {"max_seq_length": max_tokens, "do_lower_case": False}),
        ("modules.json", MODULES),
        ("1_Pooling/config.json", pooling),
    ):
        atomic_write_text(folder / name, json.dumps(content, indent=2) + "\n")
    for name in (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer_from / name).is_file():
            atomic_write_text(folder / name, (tokenizer_from / name).read_text(encoding="utf-8"))


def _read(file: Any, stored: set[str], name: str, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    if name not in stored:
        raise _missing(name, path)
    tensor = file.get_tensor(name)
    if tuple(tensor.shape) != shape:
        raise InputError(f"{path}: {name} has the shape {tuple(tensor.shape)}, config.json says {shape}")
    if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
        raise InputError(f"{path}: {name} is not floating-point or holds NaN or infinity; get the model again")
    return tensor.to(torch.float32)


def _missing(name: str, path: Path) -> InputError:
    return InputError(f"{path} holds no tensor {name!r}; it is not complete, or of another architecture")
