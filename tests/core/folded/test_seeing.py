"""Text parts of networks that see: as they were published, and what is said and refused of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf
from penjing.core.imports.importer import import_model
from tests.core.folded.seeing_cases import SEEING_CASES
from tests.core.folded.test_families import save
from tests.core.imports.test_importer import Recorder


def test_its_names_may_be_those_of_the_network_in_memory(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """As transformers 5 has them; it writes them as they were published."""
    save(tmp_path / "hf", tiny_checkpoint, *SEEING_CASES["mistral3"][:2])
    progress = Recorder()
    whole = import_model(str(tmp_path / "hf"), tmp_path / "whole", progress=progress)
    assert any("what sees and hears is left out" in note for note in progress.notes)
    weights = tmp_path / "hf" / "model.safetensors"
    stored = load_file(weights)
    assert "language_model.lm_head.weight" in stored
    named = {
        name.replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head", "lm_head")
        .replace("vision_tower.", "model.vision_tower."): tensor
        for name, tensor in stored.items()
    }
    save_file(named, weights, {"format": "pt"})
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_head_of_its_own_is_not_taken_for_the_embedding(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *SEEING_CASES["mistral3"][:2])
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(InputError, match=r"is not the embedding, which config\.json says"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")


def test_what_ends_a_text_stands_outside_of_the_part(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *SEEING_CASES["gemma3_seeing"][:2])
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [5, 7]}))
    (tmp_path / "hf" / "generation_config.json").unlink(missing_ok=True)
    out = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "out"))
    assert out.config.eos_token_ids == (5, 7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mistral3", "text_config": {"model_type": "qwen2"}}, "a text part of type 'qwen2' is not"),
        ({"model_type": "gemma3", "text_config": [1]}, "text_config must have the settings of what reads text"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]}, "is not a language model"),
        ({"model_type": "gemma3", "text_config": {"hidden_activation": "silu"}}, "activation 'silu' of gemma3_text"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fold_from_hf(values, "it")
