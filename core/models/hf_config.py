"""Hugging Face `config.json` ⇄ `DecoderConfig`: both spellings of the rotary settings, every default made explicit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.layers.hf_rope import rope_from_hf, rope_to_hf
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_variants import (
    LATENT_TYPES,
    MOE_TYPES,
    check_variants,
    latent_from_hf,
    latent_to_hf,
    moe_from_hf,
    moe_to_hf,
)
from penjing.core.models.tensor_names import check_layers

NATIVE = "penjing"  # the type of what no Hugging Face architecture expresses: its fields are those of DecoderConfig
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    NATIVE: "PenjingForCausalLM",
}
SUPPORTED_MODEL_TYPES = tuple(_ARCHITECTURES)
FOLDED = {
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "helium": "HeliumForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma2": "Gemma2ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "phi": "PhiForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "gemma": "GemmaForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hyperclovax": "HyperCLOVAXForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "cwm": "CwmForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "youtu": "YoutuForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "apertus": "ApertusForCausalLM",
    "bitnet": "BitNetForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "laguna": "LagunaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gptj": "GPTJForCausalLM",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "opt": "OPTForCausalLM",
    "falcon": "FalconForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mellum": "MellumForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "flint": "FlintForCausalLM",
    "kolibri1": "Kolibri1ForCausalLM",
}
"""Types that `penjing import` turns into one of those above (`core.folded`)."""
# What transformers assumes when a config.json leaves the field out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "mixtral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "qwen2_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 16, "sliding_window": 4096},
    "qwen3_moe": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096},
    "dots1": {"max_position_embeddings": 2048, "sliding_window": 4096},
    "deepseek_v2": {"max_position_embeddings": 2048},
    "deepseek_v3": {"max_position_embeddings": 4096},
}
_QK_NORM = ("qwen3", "qwen3_moe", "dots1")
_QKV_BIAS = ("qwen2", "qwen2_moe")  # biases on q, k and v, none on the output
_NO_BIAS = ("mistral", "mixtral", *LATENT_TYPES)
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob",
    "rope_interleave",
)  # fmt: skip
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def decoder_config_from_hf(values: dict[str, Any], source: str) -> DecoderConfig:
    """Read a parsed `config.json`.

    Args:
        values: the JSON object.
        source: its origin, named in errors.

    Raises:
        InputError: an unsupported architecture (named), rotary scaling or activation; a field missing or invalid.
    """
    model_type = _check_architecture(values, source)
    if model_type == NATIVE:
        return _native(values, source)
    # null means "the default", but here: full attention, and queries that are not compressed
    kept = ("sliding_window", "q_lora_rank")
    given = {key: value for key, value in values.items() if value is not None or key in kept}
    values = _DEFAULTS[model_type] | given
    if missing := [name for name in _REQUIRED if name not in values]:
        raise InputError(f"{source} lacks {', '.join(missing)}; get the complete config.json of the model")
    for name in (*_REQUIRED, "num_key_value_heads", "head_dim"):
        if not isinstance(values.get(name, 1), int) or isinstance(values.get(name), bool) or values.get(name, 1) < 1:
            raise InputError(f"{source}: {name} must be a positive whole number (got {values[name]!r})")
    for name in _FLAGS:
        if not isinstance(values.get(name, False), bool):
            raise InputError(f"{source}: {name} must be true or false (got {values[name]!r})")
    check_layers(values["num_hidden_layers"], source)
    theta, scaling = rope_from_hf(values, source)
    heads = values["num_attention_heads"]
    attention_bias = _attention_bias(values, model_type)
    latent = latent_from_hf(values, model_type, source)
    head_dim = values.get("head_dim", max(values["hidden_size"] // heads, 1))
    if latent is not None:
        head_dim = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    fields = {name: values[name] for name in _REQUIRED} | {
        "model_type": model_type,
        "num_key_value_heads": values.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_position_embeddings": values["max_position_embeddings"],
        "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
        "attention_bias": attention_bias,
        "attention_output_bias": attention_bias and model_type not in _QKV_BIAS,
        "mlp_bias": model_type in ("llama", "deepseek_v2") and values.get("mlp_bias", False),
        "qk_norm": model_type in _QK_NORM,
        "moe": moe_from_hf(values, model_type, source),
        "latent_attention": latent,
        "bos_token_id": _first(values.get("bos_token_id")),
        "eos_token_ids": token_ids(values.get("eos_token_id")),
        "pad_token_id": values.get("pad_token_id"),
        **_window(values, model_type, source),
    }
    try:
        return parse_config(DecoderConfig, fields, source)
    except ConfigError as error:
        raise InputError(str(error)) from None


def decoder_config_to_hf(config: DecoderConfig, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` object that transformers (4 and 5) and vLLM read as the same model.

    Args:
        dtype: of the stored weights: "float32", "bfloat16" or "float16".

    Raises:
        InputError: the combination of biases, norms, windows or variants has no Hugging Face architecture of this type.
    """
    if config.model_type == NATIVE:
        return {"architectures": [_ARCHITECTURES[NATIVE]], "dtype": dtype, **config.model_dump(mode="json")}
    _check_expressible(config)
    scaling = rope_to_hf(config.rope_scaling)
    values: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "dtype": dtype,
        "hidden_act": "silu",
        **config.model_dump(
            include={*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"}
        ),
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
        # the spelling of transformers 4, which would fall back to 10000 without it
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": one_or_list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    if config.rope_scaling.rope_type != "default":
        values["rope_scaling"] = scaling
    if config.model_type in ("llama", *_QK_NORM):
        values["attention_bias"] = config.attention_bias
    if config.model_type == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.model_type == "qwen2_moe":
        values["qkv_bias"] = config.attention_bias
    if config.model_type in ("mistral", "mixtral", "dots1"):
        values["sliding_window"] = config.sliding_window
    if config.model_type in ("qwen2", "qwen3"):
        types = _layer_types(config)
        slides = "sliding_attention" in types
        values |= {
            "use_sliding_window": slides,
            "sliding_window": config.sliding_window,
            "max_window_layers": types.index("sliding_attention") if slides else config.num_hidden_layers,
            "layer_types": types,
        }
    return values | moe_to_hf(config) | latent_to_hf(config)


def with_windows(config: DecoderConfig, windows: Sequence[int | None]) -> DecoderConfig:
    """`config` whose layers see so many tokens each, in the Hugging Face type that it has where that expresses it, else
    in one that only penjing reads.

    Args:
        windows: of each layer; None: what its type lets it see without a window.

    Raises:
        ConfigError: the network has latent attention, or a window is not positive.
    """
    sizes = [size for size in windows if size is not None]
    kinds = [config.layer_type(layer) for layer in range(config.num_hidden_layers)]
    types = [
        "sliding_attention" if size is not None else kind if kind != "sliding_attention" else "full_attention"
        for size, kind in zip(windows, kinds, strict=True)
    ]
    changed = {
        "layer_types": types,
        "sliding_window": max(sizes, default=None),
        "sliding_windows": [size or 0 for size in windows] if len(set(sizes)) > 1 else None,
    }
    made = parse_config(DecoderConfig, config.model_dump() | changed, "the network with windows")
    try:
        decoder_config_to_hf(made)
    except InputError:
        return made.model_copy(update={"model_type": NATIVE})
    return made


def token_ids(value: Any) -> tuple[int, ...]:
    """An id, a list of ids or None, as `config.json` writes end-of-text tokens → a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _check_architecture(values: dict[str, Any], source: str) -> str:
    model_type, architectures = values.get("model_type"), values.get("architectures") or []
    if not isinstance(architectures, list):
        architectures = [architectures]
    named = ", ".join(map(str, architectures))
    supported = ", ".join(SUPPORTED_MODEL_TYPES)
    if model_type is None:
        raise InputError(
            f"{source}: it names no model_type, so that this is no folder of a language model; take one that "
            "'penjing import' or 'penjing train' made of a decoder"
        )
    if isinstance(model_type, str) and model_type in FOLDED:
        raise InputError(
            f"{source}: {model_type} is read by import alone, which folds its weights: "
            "'penjing import FOLDER NEW_FOLDER', then take NEW_FOLDER"
        )
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise InputError(
            f"{source}: architecture {model_type!r}{f' ({named})' if named else ''} is not supported; "
            f"supported: {supported}; by import also {', '.join(FOLDED)}"
        )
    if architectures and _ARCHITECTURES[model_type] not in architectures:
        if named.endswith("ForSequenceClassification"):
            raise InputError(
                f"{source}: {named} is a model that scores texts, no language model: name its folder as reward.folder "
                "of a training recipe, or take a ...ForCausalLM checkpoint"
            )
        raise InputError(f"{source}: {named} is not a language model of {supported}; take a ...ForCausalLM checkpoint")
    activation = values.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise InputError(f"{source}: hidden_act {activation!r} is not supported; supported: silu")
    return model_type


def _native(values: dict[str, Any], source: str) -> DecoderConfig:
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int):
        check_layers(layers, source)
    apart = ("architectures", "dtype", "transformers_version", "quantization_config")
    fields = {name: value for name, value in values.items() if name not in apart}
    try:
        return parse_config(DecoderConfig, fields, source)
    except ConfigError as error:
        raise InputError(str(error)) from None


def _attention_bias(values: dict[str, Any], model_type: str) -> bool:
    if model_type in _NO_BIAS:
        return False
    if model_type in _QKV_BIAS:
        return model_type == "qwen2" or values.get("qkv_bias", True)
    return values.get("attention_bias", False)


def _window(values: dict[str, Any], model_type: str, source: str) -> dict[str, Any]:
    window = values.get("sliding_window")
    layers = values["num_hidden_layers"]
    if model_type in MOE_TYPES:
        types = values.get("layer_types")
        if values.get("use_sliding_window") or (isinstance(types, list) and "sliding_attention" in types):
            raise InputError(f"{source}: sliding windows of {model_type} are not supported")
        return {"sliding_window": window} if model_type == "mixtral" else {}
    if model_type == "llama" or (model_type != "mistral" and not values.get("use_sliding_window", False)):
        return {}
    if model_type == "mistral":
        return {"sliding_window": window}
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise InputError(f"{source}: max_window_layers must be a whole number (got {first!r})")
        types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise InputError(f"{source}: layer_types must name sliding_attention or full_attention for {layers} layers")
    return {"sliding_window": window, "layer_types": types} if "sliding_attention" in types else {}


def _layer_types(config: DecoderConfig) -> list[str]:
    return [config.layer_type(layer) for layer in range(config.num_hidden_layers)]


def _check_expressible(config: DecoderConfig) -> None:
    kind = config.model_type
    biases = (False,) if kind in _NO_BIAS else (True,) if kind == "qwen2" else (True, False)
    rules = {
        "qk_norm": config.qk_norm == (kind in _QK_NORM),
        "attention_bias": config.attention_bias in biases,
        "attention_output_bias": config.attention_output_bias == (config.attention_bias and kind not in _QKV_BIAS),
        "mlp_bias": not config.mlp_bias or kind == "llama",
        "intermediate_sizes": config.intermediate_sizes is None,
        "sliding_window": config.sliding_window is None or kind in ("mistral", "qwen2", "qwen3", "mixtral"),
        "sliding_windows": config.sliding_windows is None,
        "layer_types": config.layer_types is None
        or (kind in ("qwen2", "qwen3") and "lsh_attention" not in config.layer_types),
    }
    wrong = [f"{name}={getattr(config, name)}" for name, holds in rules.items() if not holds] + check_variants(config)
    if wrong:
        raise InputError(
            f"no Hugging Face architecture of type {kind!r} has {', '.join(wrong)}; choose another model_type "
            f"({NATIVE!r} has everything, but only penjing reads it)"
        )


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else (None if isinstance(value, list) else value)


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
