"""The decoder's training attention takes the kernels: whole rows, packed documents and windows, under autocast too."""

from __future__ import annotations

import pytest
import torch

from penjing.kernels import flash_attention as module
from penjing.kernels.dispatch import force_torch

CONFIG = {
    "vocab_size": 32, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_ids": (2,),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_the_decoder_attends_with_the_kernels(
    gpu_device: str, window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pydantic", reason="penjing's packages are not needed to test the kernels")
    from penjing.core.models.attention import causal_attention
    from penjing.core.models.config import DecoderConfig

    config = DecoderConfig.model_validate(CONFIG | {"sliding_window": window})
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 16, generator=generator).to(gpu_device) for heads in (4, 2, 2))
    documents = torch.arange(40, device=gpu_device).view(2, 20) // 6 if packed else None
    with force_torch():
        expected = causal_attention(config, documents)(0, q, k, v)
    calls = []
    apply = module._Attention.apply
    monkeypatch.setattr(module._Attention, "apply", lambda *arguments: (calls.append(1), apply(*arguments))[1])
    found = causal_attention(config, documents)(0, q, k, v)
    assert len(calls) == 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_autocast_casts_mixed_inputs(gpu_device: str) -> None:
    q = torch.randn(1, 9, 2, 16, device=gpu_device)
    with torch.autocast(gpu_device, dtype=torch.float16):
        out = module.flash_attention(q, q.half(), q)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), module.flash_attention(q, q, q), rtol=1e-2, atol=1e-2)
