"""Text parts of networks that see, as `test_families.CASES` has families; sizes stand in the text part."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 0,
}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
_SIGLIP = EYES | {"patch_size": 2, "image_size": 4}
_YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
_GEMMA = {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 12}
_MISTRAL = {"model_type": "mistral", "head_dim": 12, "sliding_window": None}
_MINISTRAL = {"model_type": "ministral3", "head_dim": 12, "tie_word_embeddings": True}
_MINISTRAL |= {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}


def _inside(text: dict[str, Any], eyes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"text_config": SIZES | text, "vision_config": eyes} | more


SEEING_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3_seeing": ("gemma3", _inside(_GEMMA, _SIGLIP, mm_tokens_per_image=4), "penjing"),
    "mistral3": ("mistral3", _inside(_MISTRAL, _SIGLIP, tie_word_embeddings=False), "llama"),
    "mistral3_ministral3": ("mistral3", _inside(_MINISTRAL, _SIGLIP), "llama"),
}
