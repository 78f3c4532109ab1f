"""Imported families with experts in INT8: expert by expert, in the C++ step, near what transformers says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.models.moe import MoE
from penjing.core.runtime.fused import fuse_decoder
from penjing.core.runtime.quantized import Int8Linear
from tests.compress.conftest import write_recipe
from tests.core.folded.expert_cases import EXPERT_CASES
from tests.core.folded.test_families import save
from tests.kernels.cpu import needs_extension

SETTINGS = ["steps.0.transform.rotate=false", "steps.0.transform.search_steps=4"]
WIDE = {"hidden_size": 64, "intermediate_size": 96}
WIDTHS = {"moe_intermediate_size": 48, "shared_intermediate_size": 112, "shared_expert_intermediate_size": 64}
ALWAYS = ("flex_olmo", "lfm2_moe", "afmoe", "laguna")
FULL = (
    *("granitemoe", "granitemoeshared", "granite_4_experts_nope", "granitemoe_swa", "hunyuan_moe"),
    *(
        "ernie4_5_moe",
        "cohere2_moe_sigmoid",
        "minimax_m2",
        "exaone_moe",
        "solar_open_bias",
        "hy_v3",
        "mellum",
        "cohere2_moe_sum",
        "phimoe",
        "flint",
        "kolibri1",
    ),
)


@needs_extension
@pytest.mark.parametrize("case", [*ALWAYS, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)])
def test_int8_says_nearly_what_transformers_does(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = EXPERT_CASES[case]
    inner = {name: width for name, width in WIDTHS.items() if name in changes}
    reference = save(tmp_path / "hf", tiny_checkpoint, kind, changes | WIDE | inner)
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int8"), SETTINGS)
    verify_artifact(artifact)
    model = load_model(artifact).model
    assert fuse_decoder(model) is not None
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    assert all(isinstance(part, Int8Linear) for each in experts for part in each.experts[-1].children())
    assert not any(isinstance(each.gate, Int8Linear) for each in experts)
    tokens = torch.arange(64).view(1, -1) * 5 % 320
    with torch.no_grad():
        whole, rounded = reference(tokens).logits, model(tokens)
    # Of most tokens: for some a router chooses another expert.
    error_T = (whole - rounded).square().mean(-1).sqrt()
    assert float(error_T.median()) < 0.2 * float(whole.std())


def test_latent_attention_stays_floating(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES["glm4_moe_lite"][:2])
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    with pytest.raises(InputError, match="has latent attention, and compression handles plain decoder layers only"):
        run_recipe(write_recipe(tmp_path, folder, tmp_path / "int8"))
