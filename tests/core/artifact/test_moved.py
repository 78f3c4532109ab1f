"""Adapters that were trained beside a folder whose layers an import moved are refused; others are taken."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.run import run_recipe
from penjing.core.artifact.lora import BASE, AdapterFolder, base_hash
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import write_manifest
from tests.compress.conftest import write_recipe
from tests.core.artifact.adapters import adapter_tensors, write_adapter
from tests.core.folded.test_families import CASES, save

QUERIES = ["self_attn.k_proj", "self_attn.q_proj"]
MOVED = {
    "llama": [],
    "olmo2": [],
    "gemma3": [],
    "gemma2": ["self_attn.q_proj"],  # by their factor
    "granite": ["mlp.down_proj", "self_attn.o_proj", "self_attn.q_proj"],
    "glm4": QUERIES,
    "phi3_partial": QUERIES,
    "cohere": ["mlp.down_proj", *QUERIES[:1], "self_attn.o_proj", *QUERIES[1:]],  # whose outputs lose their mean
}


@pytest.mark.parametrize("case", MOVED)
def test_what_an_import_moved_is_kept_and_told(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = CASES.get(case, (case, {}, ""))
    save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    checkpoint = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "ours"))
    assert checkpoint.manifest is not None
    assert checkpoint.manifest.extra.get("moved", []) == MOVED[case]
    tensors = adapter_tensors(checkpoint.folder, 4)
    whole = write_adapter(tmp_path / "whole", tensors, 4)
    if not MOVED[case]:
        AdapterFolder("whole", whole, checkpoint)
        return
    with pytest.raises(ConfigError, match=rf"whole .* where .*{MOVED[case][0]}.* have another order"):
        AdapterFolder("whole", whole, checkpoint)
    still = {name: each for name, each in tensors.items() if not any(f".{leaf}." in name for leaf in MOVED[case])}
    AdapterFolder("still", write_adapter(tmp_path / "still", still, 4), checkpoint)


@pytest.mark.parametrize("extra", [3, None, "self_attn.q_proj", [3], {"self_attn.q_proj": 1}])
@pytest.mark.parametrize("key", ["moved", "originals"])
def test_a_manifest_that_lists_no_texts_is_refused(key: str, extra: Any, tmp_path: Path, tiny_checkpoint: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_checkpoint, base)
    write_manifest(base, "checkpoint", {"command": "tests"}, {key: extra})
    settings = {BASE: "another"} if key == "originals" else {}
    folder = write_adapter(tmp_path / "adapter", adapter_tensors(base, 4), 4, **settings)
    with pytest.raises(InputError, match=f"penjing.json: {key} must be a list of texts"):
        AdapterFolder("adapter", folder, open_checkpoint(base))


def test_an_artifact_of_it_refuses_alike_and_what_penjing_trained_is_taken(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["glm4"][:2])
    ours = import_model(str(tmp_path / "hf"), tmp_path / "ours")
    settings = ["steps.0.transform.rotate=false", "steps.0.transform.search_steps=0", "guard.perplexity_ratio=9"]
    artifact = open_checkpoint(run_recipe(write_recipe(tmp_path, ours, tmp_path / "int8"), settings))
    folder = write_adapter(tmp_path / "theirs", adapter_tensors(ours, 4), 4)
    with pytest.raises(ConfigError, match="was not trained beside what penjing imported"):
        AdapterFolder("theirs", folder, artifact)
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace("{", f'{{"{BASE}": "{base_hash(ours)}", ', 1))
    AdapterFolder("ours", folder, artifact)
