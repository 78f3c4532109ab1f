"""Loading checkpoints and INT8 artifacts: the same numbers as transformers, and one clear error for each damage."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.runtime.batch_invariant import BatchInvariantLinear
from penjing.core.runtime.fused import fuse_decoder
from penjing.core.runtime.quantized import Int8Linear
from tests.core.artifact.int8_artifact import quantization_config, write_int8_artifact
from tests.kernels.cpu import needs_extension


def tokens(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))


def transformers_logits(folder: Path, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@torch.inference_mode()
def test_checkpoint_equals_transformers(tiny_checkpoint: Path) -> None:
    loaded = load_model(tiny_checkpoint)
    ids = tokens(320, 2, 40)
    assert (loaded.model(ids) - transformers_logits(tiny_checkpoint, ids)).abs().max() <= 1e-4
    assert loaded.scheme == "fp32"
    assert loaded.manifest is not None
    assert loaded.chat_template is not None
    assert loaded.tokenizer.vocab_size == 320
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3", "qk_norm": True, "head_dim": 32, "tie_word_embeddings": False},
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "mistral", "sliding_window": 7, "tie_word_embeddings": False},
    ],
    ids=lambda changes: changes["model_type"],
)
@torch.inference_mode()
def test_other_families_equal_transformers(make_tiny_checkpoint: Callable[..., Path], changes: dict[str, Any]) -> None:
    folder = make_tiny_checkpoint(**changes)
    ids = tokens(320, 2, 40)
    assert (load_model(folder).model(ids) - transformers_logits(folder, ids)).abs().max() <= 1e-4


@torch.inference_mode()
def test_plain_hugging_face_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    # transformers writes bfloat16 weights and its own spelling of config.json; no penjing.json.
    AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_checkpoint / name, tmp_path)
    loaded = load_model(tmp_path)
    ids = tokens(320, 1, 30)
    assert loaded.manifest is None
    assert loaded.model.lm_head.weight.dtype == torch.float32
    assert (loaded.model(ids) - transformers_logits(tmp_path, ids)).abs().max() <= 1e-4


def fake_quantized_logits(artifact: Path, ids: Tensor) -> Tensor:
    """Logits in float64 of the artifact's stored integers × scales, with activations rounded per token."""
    loaded = load_model(artifact)
    model = loaded.model.double()
    model.model.inverse_frequency = model.model.inverse_frequency.float()

    class Rounded(nn.Module):
        def __init__(self, layer: Int8Linear):
            super().__init__()
            self.weight = layer.packed.weight_NK.double() * layer.packed.scale_N[:, None]

        def forward(self, x: Tensor) -> Tensor:
            scale = x.abs().amax(-1, keepdim=True) / 127
            return nn.functional.linear(torch.round(x / scale) * scale, self.weight)

    for name, layer in list(model.named_modules()):
        if isinstance(layer, Int8Linear):
            model.set_submodule(name, Rounded(layer))
        elif isinstance(layer, BatchInvariantLinear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.weight = layer.weight
            model.set_submodule(name, plain)
    return model(ids)


@pytest.mark.parametrize("quantize_head", [False, True])
@pytest.mark.parametrize("embedding_dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_artifact(tiny_checkpoint: Path, tmp_path: Path, quantize_head: bool, embedding_dtype: torch.dtype) -> None:
    artifact = write_int8_artifact(
        tiny_checkpoint, tmp_path / "int8", quantize_head=quantize_head, embedding_dtype=embedding_dtype
    )
    loaded = load_model(artifact)
    ids = tokens(320, 2, 40)
    logits = loaded.model(ids)
    assert loaded.scheme == "int8"
    assert logits.dtype == torch.float32
    assert isinstance(loaded.model.lm_head, Int8Linear) == quantize_head
    assert isinstance(loaded.model.get_submodule("model.layers.1.mlp.down_proj"), Int8Linear)
    expected = fake_quantized_logits(artifact, ids)
    # One activation on a rounding boundary moves by a whole step: the bound is a step's effect, not float noise.
    assert (logits - expected).norm() / expected.norm() < 2e-3
    full = load_model(tiny_checkpoint).model(ids)
    assert 1e-3 < (logits - full).norm() / full.norm() < 0.1


@pytest.mark.parametrize("quantize_head", [False, True])
@torch.inference_mode()
def test_artifact_loads_in_transformers(tiny_checkpoint: Path, tmp_path: Path, quantize_head: bool) -> None:
    artifact = write_int8_artifact(tiny_checkpoint, tmp_path / "int8", quantize_head=quantize_head)
    ids = tokens(320, 2, 40)
    ours, theirs = load_model(artifact).model(ids), transformers_logits(artifact, ids)
    full = load_model(tiny_checkpoint).model(ids)
    # Their activation scales are amax / 127.5: the two differ by rounding, about as much as each does from fp32.
    assert (ours - theirs).norm() < 1.5 * (ours - full).norm()
    assert (ours - theirs).norm() / full.norm() < 0.05


def damage(name: str, replacement: Tensor | None) -> Callable[[str, Tensor], Tensor | None]:
    return lambda key, tensor: replacement if key == name else tensor


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(f"{UP}.weight_scale", None), f"{UP}.weight_scale is missing"),
        (damage(f"{UP}.weight", None), f"{UP}.weight is missing"),
        (damage(f"{UP}.weight", torch.zeros(96, 63, dtype=torch.int8)), r"\(96, 63\)"),
        (damage(f"{UP}.weight", torch.zeros(96, 64)), "int8"),
        (damage(f"{UP}.weight_scale", torch.ones(95, 1)), "scale_N"),
        (damage("model.norm.weight", torch.ones(63)), r"model.norm.weight has shape \(63,\)"),
        (damage("model.norm.weight", torch.ones(64, dtype=torch.int8)), "model.norm.weight .* torch.int8"),
        (damage("model.norm.weight", None), "model.norm.weight is missing"),
    ],
)
def test_damaged_artifacts_are_named(
    tiny_checkpoint: Path, tmp_path: Path, change: Callable[[str, Tensor], Tensor | None], message: str
) -> None:
    artifact = write_int8_artifact(tiny_checkpoint, tmp_path / "int8", change=change)
    with pytest.raises(InputError, match=message):
        load_model(artifact)


def test_another_scheme_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, said in (
        ("float-quantized", r"with format 'float-quantized': penjing runs .*int-quantized"),
        ("pack-quantized", r"group_0\.weights\.num_bits is 8: penjing runs 4"),  # packed are 4 bits alone
    ):
        quantization = quantization_config(["lm_head"], format=name)
        artifact = write_int8_artifact(tiny_checkpoint, tmp_path / name, quantization=quantization)
        with pytest.raises(InputError, match=said):
            load_model(artifact)


def test_a_quantized_head_cannot_be_tied(tiny_checkpoint: Path, tmp_path: Path) -> None:
    artifact = write_int8_artifact(tiny_checkpoint, tmp_path / "int8", quantization=quantization_config([]))
    with pytest.raises(InputError, match="tied to the embedding"):
        load_model(artifact)


def test_unexpected_tensors_are_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    # Layers that the scheme leaves alone have no scale: quantized weights there would run as garbage.
    quantization = quantization_config(["lm_head", "re:.*mlp.*"])
    artifact = write_int8_artifact(tiny_checkpoint, tmp_path / "int8", quantization=quantization)
    with pytest.raises(InputError, match=r"mlp.gate_proj.weight has shape .* torch.int8"):
        load_model(artifact)
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "short")
    (folder / "penjing.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(InputError, match=r"9 tensors have no place .* model.layers.1.input_layernorm.weight"):
        load_model(folder)


def test_changed_weights_fail_their_hash(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "changed")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    with pytest.raises(InputError, match="SHA-256"):
        load_model(folder)


def test_weights_damaged_in_their_header_are_reported_as_changed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The hash is checked while the model is built; it explains what the builder stumbles over."""
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_checkpoint, folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:-20])
    with pytest.raises(InputError, match=r"tokenizer.json has SHA-256 .*changed or damaged"):
        load_model(folder)


def test_loading_imports_no_symbolic_algebra(tiny_checkpoint: Path) -> None:
    """torch fills weights on the meta device through code whose imports take more than a second."""
    code = "import sys\nfrom pathlib import Path\nfrom penjing.core.checkpoint.load import load_model\n"
    code += f"load_model(Path({str(tiny_checkpoint)!r}))\nsys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_extension
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks at the mappings of the process")
def test_stored_int8_weights_are_let_go_once_they_are_packed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    artifact = write_int8_artifact(tiny_checkpoint, tmp_path / "int8", quantize_head=True)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(artifact))

    loaded = load_model(artifact)
    both = mappings()
    step = fuse_decoder(loaded.model)
    del loaded
    gc.collect()
    assert step is not None
    assert (both, mappings()) == (2, 1)  # what is left holds the embedding, which is read in place
