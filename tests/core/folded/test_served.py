"""Imported networks as the engine computes them, step by step in the C++ kernels: answers are those of transformers,
and nearly so in INT8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.imports.importer import import_model
from tests.compress.conftest import write_recipe
from tests.core.folded.expert_cases import EXPERT_CASES
from tests.core.folded.served import close, of_transformers, served
from tests.core.folded.test_families import CASES, save

TEXT = torch.randint(0, 320, (1, 70), generator=torch.Generator().manual_seed(2))
NEW = (
    "gemma",
    "vaultgemma",
    "granite_4",
    "granite_4_nope",
    "hyperclovax",
    "cwm",
    "ministral3",
    "nanochat",
    "jais2",
    "hunyuan",
    "gpt2",
    "granite_swa",
    "gpt_neo",
    "gpt_bigcode",
    "opt",
    "gptj",
    "falcon_new",
    "apertus",
    "lfm2",
    "lfm3",
)
ALWAYS = (
    "gemma",
    "granite_4",
    "nanochat",
    "gpt2",
    "apertus",
    "granite_swa",
    "lfm2",
    "lfm3",
)  # the others where there is time


@pytest.mark.parametrize("case", [*NEW, "youtu", "minicpm3_longrope", "gpt_oss", *EXPERT_CASES])
def test_the_engine_says_what_transformers_does(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    text = TEXT[:, :60]  # of 64, the context of ministral3
    close(served(import_model(str(tmp_path / "hf"), tmp_path / "out"), text), of_transformers(reference, text))


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.full) for case in NEW])
def test_int8_says_nearly_that(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = CASES[case]
    wide = changes | {"hidden_size": 64, "intermediate_size": 96}
    wide |= {"opt": {"word_embed_proj_dim": 64, "head_dim": 16}, "falcon": {}}.get(kind, {"head_dim": 16})
    reference = save(tmp_path / "hf", tiny_checkpoint, kind, wide)
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int8"), ["steps.0.transform.rotate=false"])
    verify_artifact(artifact)
    text = TEXT[:, :60]
    expected = of_transformers(reference, text)
    assert float((served(artifact, text) - expected).abs().mean()) < 0.1 * float(expected.std())
