"""Decoders with experts, latent attention and shared layers from a saved checkpoint to served tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.decoder.check import check_model
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.runtime.fused import fuse_decoder, why_not_fused
from penjing.kernels.dispatch import cpu_extension
from penjing.serve.generate import generate_stream
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import ids_of

MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SIGMOID = MOE | {
    "num_experts": 8,
    "scoring_func": "sigmoid",
    "router_bias": True,
    "n_group": 4,
    "topk_group": 2,
    "shared_expert_intermediate_size": 48,
    "mlp_only_layers": (0,),
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "moe": MOE},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "attention_bias": True,
        "moe": MOE | {"shared_expert_intermediate_size": 32, "shared_expert_gate": True},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "moe": SIGMOID,
        "latent_attention": LATENT,
        "head_dim": 20,
        "num_key_value_heads": 4,
    },
    "shared": {"model_type": "penjing", "num_hidden_layers": 4, "shared_layers": 3},
    "everything": {
        "model_type": "penjing",
        "num_hidden_layers": 4,
        "shared_layers": 2,
        "moe": SIGMOID | {"mlp_only_layers": (0, 1)},
        "latent_attention": LATENT | {"rope_interleave": False},
        "head_dim": 20,
        "num_key_value_heads": 4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_generation_is_the_argmax_of_the_model(make_tiny_checkpoint: Callable[..., Path], kind: str) -> None:
    folder = make_tiny_checkpoint(**KINDS[kind])
    loaded = load_model(folder)
    outputs = list(generate_stream(folder, "in the other", SamplingParams(temperature=0, max_tokens=12)))
    made = ids_of(outputs)
    ids = loaded.tokenizer.encode("in the other")
    with torch.inference_mode():
        for token in made:
            assert int(loaded.model(torch.tensor(ids))[-1].argmax()) == token
            ids.append(token)
    assert len(made) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_imported_copy_computes_the_same(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    folder = make_tiny_checkpoint(**KINDS[kind])
    import_model(str(folder), tmp_path / "copy")
    first, copy = load_model(folder), load_model(tmp_path / "copy")
    assert copy.config == first.config
    ids = torch.arange(40)
    with torch.inference_mode():
        assert torch.equal(first.model(ids), copy.model(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_compression_refuses_by_name_and_fusing_explains(
    make_tiny_checkpoint: Callable[..., Path], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_checkpoint(**KINDS[kind])
    if kind in ("mixtral", "qwen2_moe"):  # tests/compress/decoder/test_experts.py quantizes such networks
        check_model(open_checkpoint(folder))
    else:
        with pytest.raises(InputError, match=r"has (latent attention|shared layers).*penjing serve"):
            check_model(open_checkpoint(folder))
    model = load_model(folder).model
    if kind in ("shared", "mixtral", "qwen2_moe"):
        assert (why_not_fused(model) is None) == (cpu_extension() is not None)
    elif cpu_extension() is not None:
        caplog.set_level("INFO", "penjing")
        assert fuse_decoder(model) is None
        assert "is a LatentAttention" in caplog.text


def test_shared_layers_are_stored_once_and_transformers_refuses_them(
    make_tiny_checkpoint: Callable[..., Path],
) -> None:
    from transformers import AutoConfig

    folder = make_tiny_checkpoint(**KINDS["shared"])
    layers = {name.split(".")[2] for name in open_checkpoint(folder).tensor_names if ".layers." in name}
    assert layers == {"0", "3"}
    with pytest.raises(ValueError, match="penjing"):
        AutoConfig.from_pretrained(folder)
