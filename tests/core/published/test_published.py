"""Folded families go back to folders that transformers reads, with the logits of what was imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.published.forms import FORMS, published
from penjing.core.published.save import save_published
from penjing.core.published.tensors import Spelling
from tests.core.folded.test_families import CASES, save

IDS = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
ANOTHER = {"gemma_untied": "gemma", "granite_4_nope": "smollm3", "cwm": "smollm3"}  # which of two fits, is one
BACK = {case: ANOTHER.get(case, kind) for case, (kind, _, becomes) in CASES.items() if becomes == "penjing"}
BACK = {case: kind for case, kind in BACK.items() if kind in FORMS}


def write(folder: Path, checkpoint: Checkpoint, **how: Any) -> dict[str, Any]:
    folder.mkdir()
    tensors = ((name, checkpoint.get(name)) for name in checkpoint.tensor_names)
    save_published(folder, checkpoint.config, tensors, tokenizer_from=checkpoint.folder, **how)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("case", BACK)
def test_transformers_reads_what_was_imported(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    ours = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "ours"))
    assert write(tmp_path / "out", ours)["model_type"] == BACK[case]
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    theirs, said = loaded
    assert not any(said.values()), said
    with torch.no_grad():
        wanted, found = load_model(ours.folder).model(IDS), theirs(IDS).logits
    assert float(wanted.std()) > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-5 * float(wanted.abs().max()))


def test_every_form_is_read_by_a_case() -> None:
    assert {*BACK.values(), "cwm"} == set(FORMS), "cwm is what smollm3 has too, but for heads of another size"


@pytest.mark.parametrize("case", ["gpt_neox_in_turn", "nemotron", "granitemoe_bias", "gpt_oss", "nanochat"])
def test_what_no_form_holds_is_refused_by_name(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    config = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "ours")).config
    with pytest.raises(InputError, match=r"here has .*: no type of network that transformers reads has all of it"):
        published(config, "here")


def test_numbers_of_sixteen_bits_have_them_again(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Import widens what it folds: embedding and norms of a Gemma."""
    changes = {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 16}
    reference = save(tmp_path / "first", tiny_checkpoint, "gemma3_text", changes)
    reference.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "hf" / name).write_bytes((tmp_path / "first" / name).read_bytes())
    ours = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "ours"))
    assert write(tmp_path / "out", ours, dtype=torch.bfloat16)["dtype"] == "bfloat16"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in reference.state_dict().items():
        found = theirs.state_dict()[name]
        assert found.dtype == torch.bfloat16, name
        assert torch.equal(found, parameter), name


def test_a_rotated_stream_cannot_lose_its_mean(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["cohere"][:2])
    ours = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "ours"))
    turn = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(0))).Q
    spelling = Spelling(published(ours.config, "here").fold, "here")
    with pytest.raises(InputError, match="here was rotated"):
        list(spelling.tensors([("model.embed_tokens.weight", ours.get("model.embed_tokens.weight") @ turn)]))


def test_parts_of_one_matrix_and_norms_that_are_one_are_checked(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["cohere"][:2])
    ours = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "ours"))
    spelling = Spelling(published(ours.config, "here").fold, "here")
    norms = [f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    same = [(name, torch.ones(48)) for name in norms]
    assert [name for name, _ in spelling.tensors(same)] == ["model.layers.0.input_layernorm.weight"]
    with pytest.raises(InputError, match=r"input_layernorm and .*post_attention_layernorm differ"):
        list(spelling.tensors([same[0], (norms[1], torch.full((48,), 2.0))]))
    with pytest.raises(InputError, match=r"post_attention_layernorm has no weight"):
        list(spelling.tensors(same[:1]))


def test_a_plain_network_that_is_called_otherwise_is_a_plain_one(tiny_checkpoint: Path) -> None:
    config = open_checkpoint(tiny_checkpoint).config.model_copy(update={"model_type": "penjing"})
    assert published(config, "here").values["model_type"] == "llama"
    uneven = config.model_copy(update={"intermediate_sizes": (96, 128), "intermediate_size": 128})
    with pytest.raises(InputError, match="layers of different widths"):
        published(uneven, "here")
