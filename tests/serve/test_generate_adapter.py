"""`penjing generate --adapter`: the answer of the merged checkpoint, and what is no adapter of the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from penjing.core.artifact.lora import BASE, base_hash
from penjing.core.checkpoint.decoder import open_checkpoint, save_checkpoint
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import write_manifest
from penjing.core.progress import Silent
from penjing.serve.engine.config import EngineConfig
from penjing.serve.options import engine_config
from penjing.serve.runner.load import load_engine
from penjing.serve.samples import sample_texts
from tests.core.artifact.adapters import adapter_tensors, merge, write_adapter
from tests.kernels.cpu import needs_extension
from tests.serve.seeing import write_seeing

pytestmark = needs_extension


@pytest.fixture
def adapter(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """Lies where `penjing train` writes one: in the merged checkpoint's folder."""
    settings: dict[str, Any] = {BASE: base_hash(tiny_checkpoint), "base_model_name_or_path": "build/tiny"}
    folder = write_adapter(tmp_path / "merged/adapter", adapter_tensors(tiny_checkpoint), **settings)
    merged = merge(load_file(tiny_checkpoint / "model.safetensors"), load_file(folder / "adapter_model.safetensors"), 2)
    save_checkpoint(
        tmp_path / "merged", open_checkpoint(tiny_checkpoint).config, merged.items(), tokenizer_from=tiny_checkpoint
    )
    write_manifest(tmp_path / "merged", "checkpoint", {"command": "tests"})
    return folder


def test_it_answers_as_the_merged_checkpoint_does(
    tiny_checkpoint: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*arguments: str) -> str:
        assert _run(["generate", *arguments, "--max-tokens", "12"]) == 0
        return capsys.readouterr().out

    base, merged = str(tiny_checkpoint), str(adapter.parent)
    for how in ([], ["--chat"]):
        with_adapter = answer(base, "in the", "--adapter", str(adapter), *how)
        assert with_adapter == answer(merged, "in the", *how)
        assert with_adapter != answer(base, "in the", *how)


def test_what_is_no_adapter_of_the_model(
    tiny_checkpoint: Path,
    make_tiny_checkpoint: Callable[..., Path],
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(model: Path, folder: Path, says: str) -> None:
        assert _run(["generate", str(model), "in the", "--adapter", str(folder)]) in (2, 3)
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.fullmatch(rf"error: adapter given \({folder}\).*{says}.*\n", shown.err)

    refused(tiny_checkpoint, tmp_path / "nowhere", "there is no such folder")
    refused(tiny_checkpoint, tiny_checkpoint, r"no adapter_config\.json.*give a folder with it")
    refused(tiny_checkpoint, adapter.parent, rf"no adapter_config\.json.*give {adapter}")
    refused(adapter.parent, adapter, "trained beside build/tiny, and .* has other weights")
    refused(make_tiny_checkpoint(hidden_size=32), adapter, "give an adapter of this model")
    (adapter / "adapter_model.safetensors").unlink()
    refused(tiny_checkpoint, adapter, "adapter_model.safetensors cannot be read")


def test_a_model_that_sees_takes_none(adapter: Path, tmp_path: Path) -> None:
    write_seeing(tmp_path / "seeing")
    with pytest.raises(ConfigError, match="a decoder that sees takes no adapters"):
        load_engine(tmp_path / "seeing", EngineConfig(adapters={"a": adapter}))


def test_samples_are_of_one_adapter(tiny_checkpoint: Path, adapter: Path, tmp_path: Path) -> None:
    def sample(out: Path, folder: Path | None) -> str:
        config = engine_config("auto", "cpu", "forced", None, folder)
        sampling = {"temperature": 1.0, "max_tokens": 12, "seed": 5} | ({"lora_name": "given"} if folder else {})
        sample_texts(tiny_checkpoint, "in the", sampling, 1, out, Silent(), engine_config=config)
        return (out / "sample-000000.txt").read_text()

    texts = tmp_path / "texts"
    assert sample(texts, adapter) != sample(tmp_path / "plain", None)
    assert sample(texts, adapter)
    settings = adapter / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 8', '"lora_alpha": 4'))
    with pytest.raises(InputError, match="samples of another model, adapter, prompt or setting"):
        sample(texts, adapter)
