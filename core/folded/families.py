"""Families of decoders that become plain ones when their weights are read: factors, orders and names are folded away.

What a family multiplies (embeddings, residuals, scores, logits) goes into neighbouring weights, which changes no
function: a factor of the embedding leaves a tied LM head through the last norm. Rotated dimensions are put in our
order: heads multiply queries with keys, and both move alike. Norms that multiply by 1 + w become w. What is left are
fields of `DecoderConfig`; where those are Llama's, the folder is a Llama that every engine reads.
"""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import CENTRED
from penjing.core.folded.cohere import COHERES
from penjing.core.folded.experts import EXPERTS
from penjing.core.folded.fold import (
    SEEING,
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    flag_of,
    inside_of,
    latent_of,
    number_of,
    partial_of,
    ropes_of,
    sliding_of,
    text_of,
    unrotated_of,
)
from penjing.core.folded.gated import GATED
from penjing.core.folded.gemma import GEMMAS
from penjing.core.folded.gpt_oss import GPT_OSS
from penjing.core.folded.granite import GRANITES
from penjing.core.folded.hunyuan import HUNYUANS
from penjing.core.folded.learned import LEARNED
from penjing.core.folded.lfm2 import LFM2S
from penjing.core.folded.phimoe import PHIMOE
from penjing.core.models.hf_config import FOLDED

_AROUND_GLM = {
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}

# null says that there is none, not what is usual
_NONE = ("final_logit_softcapping", "attn_logit_softcapping", "q_lora_rank", "scale_depth", "dim_model_base")
_NONE += ("attention_value_scale",)


def folds(values: Values) -> bool:
    """Whether a parsed `config.json` is of a family that is read here."""
    kind = values.get("model_type")
    return isinstance(kind, str) and (kind in _FAMILIES or kind in SEEING)


def fold_from_hf(values: Values, source: str) -> Fold:
    """Read a parsed `config.json` of one of these families.

    Raises:
        InputError: it is another kind of model, a field is missing or invalid, or it has what no layer of ours has.
    """
    kind = values["model_type"]
    family = None if kind in SEEING else _FAMILIES[kind]
    named = values.get("architectures") or [FOLDED[kind]]
    if not isinstance(named, list) or not {FOLDED[kind], family and family.also} & set(map(str, named)):
        said = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
        raise InputError(f"{source}: {said} is not a language model; take a {FOLDED[kind]} folder")
    if family is None:
        text = text_of(values, source)
        inner = _FAMILIES.get(text["model_type"], _MISTRAL)
        return inside_of(_read(inner, text, source))
    return _read(family, values, source)


def _read(family: Family, values: Values, source: str) -> Fold:
    kind, usual = values["model_type"], family.defaults
    if "rope_parameters" in usual and values.get("rope_scaling"):  # as older folders call them: none is usual beside it
        theta = usual["rope_parameters"]["rope_theta"]
        usual = usual | {"rope_theta": theta, "rope_parameters": values["rope_scaling"]}
    given = {name: each for name, each in values.items() if each is not None or name in _NONE}
    given = usual | {ours: given[name] for name, ours in family.aliases.items() if name in given} | given
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    activation = next((given[name] for name in names if given.get(name)), family.activations[0])
    if activation not in family.activations:
        known = " or ".join(family.activations)
        raise InputError(f"{source}: the activation {activation!r} of {kind} is not supported; {known} is")
    return family.read(given | {"hidden_act": activation}, source)


def _smollm3(values: Values, source: str) -> Fold:
    layers = count_of(values, "num_hidden_layers", source)
    interval = count_of(values, "no_rope_layer_interval", source)
    rotates = values.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers:
        raise InputError(f"{source}: no_rope_layers must have a number for each of {layers} layers")
    kinds = None if all(rotates) else ["main" if each else "none" for each in rotates]
    sliding: Values = {}
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        types = ["full_attention" if each else "sliding_attention" for each in rotates]
        sliding = sliding_of({"layer_types": types} | values, source, 0)
    return Fold(config_of(values, source, layer_rotary=kinds, **sliding))


def _olmo2(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, norms="after", qk_norm=True, qk_norm_over="all"), _AFTER)


def _olmo3(values: Values, source: str) -> Fold:
    theta = values.get("rope_theta", 10000.0)
    rope, local = ropes_of(values, source, theta, theta)
    sliding = sliding_of(values, source, 4)
    kinds = ["local" if kind == "sliding_attention" else "main" for kind in sliding["layer_types"]]
    changes = {"norms": "after", "qk_norm": True, "qk_norm_over": "all", "layer_rotary": kinds}
    return Fold(config_of(values, source, rope, **changes, **sliding, rope_local_theta=local), _AFTER)


def _exaone4(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, norms="after", qk_norm=True, **unrotated_of(values, source)), _AFTER)


def _phi3(values: Values, source: str) -> Fold:
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := values.get(name), dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            values = values | {name: rope | {"rope_type": "longrope"}}  # what older folders call it
    window = {"sliding_window": values["sliding_window"]} if values.get("sliding_window") else {}
    config, rotary = partial_of(values, source, **window)
    return Fold(config, fused=True, fused_mlp=True, rotary=rotary)


def _glm(values: Values, source: str) -> Fold:
    changes: Values = {"attention_bias": bool(values["attention_bias"]), "attention_output_bias": False}
    around = values["model_type"] == "glm4"
    config, rotary = partial_of(values, source, **changes | ({"norms": "around"} if around else {}))
    names = _AROUND_GLM if around else {}
    return Fold(config, names, fused_mlp=True, rotary=rotary, interleaved=True)


def _interleaved(values: Values, source: str) -> Fold:
    changes: Values = {"attention_output_bias": False}
    if values["model_type"] == "ernie4_5":
        changes = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), bool(values.get("use_bias")))
    config = config_of(values, source, **changes)
    return Fold(config, interleaved=True)


def _arcee(values: Values, source: str) -> Fold:
    config = config_of(values, source, mlp_gated=False, activation="relu2")
    return Fold(config, {"mlp.gate_proj": "mlp.up_proj"})


def _bitnet(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, inner_norms=True, activation="relu2"))


def _apertus(values: Values, source: str) -> Fold:
    config = config_of(values, source, qk_norm=True, mlp_gated=False, activation="xielu")
    names = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}
    # Beside what is learned older and newer folders hold two numbers that are the same in all.
    return Fold(config, names | {"mlp.gate_proj": "mlp.up_proj"}, unused=(".act_fn.beta", ".act_fn.eps"))


def _internlm3(values: Values, source: str) -> Fold:
    names = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
    given = {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
    return Fold(config_of(values | given, source))


def _iquestcoder(values: Values, source: str) -> Fold:
    for name in ("clip_qkv", "use_sliding_window"):
        if values.get(name):
            raise InputError(f"{source}: {name}={values[name]!r} is not supported")
    return Fold(config_of(values, source))


def _cwm(values: Values, source: str) -> Fold:
    layers = count_of(values, "num_hidden_layers", source)
    usual = ["full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(layers)]
    return Fold(config_of(values, source, **sliding_of({"layer_types": usual} | values, source, 0)))


def _ministral3(values: Values, source: str) -> Fold:
    """Within the original context of YaRN, beyond which queries grow with their position."""
    rope = values["rope_parameters"]
    if not isinstance(rope, dict) or rope.get("original_max_position_embeddings") is None:
        raise InputError(f"{source}: rope_parameters lack original_max_position_embeddings; get the complete file")
    original = number_of(rope, "original_max_position_embeddings", source)
    context = int(min(original, number_of(values, "max_position_embeddings", source)))
    return Fold(config_of(values, source, max_position_embeddings=context, sliding_window=values.get("sliding_window")))


def _youtu(values: Values, source: str) -> Fold:
    return Fold(latent_of(values, source))


def _nanochat(values: Values, source: str) -> Fold:
    cap = values["final_logit_softcapping"]
    capped: Values = {} if cap is None else {"logit_cap": number_of(values, "final_logit_softcapping", source)}
    # The embedding is normed when it is looked up, and not as a head.
    tied, how = flag_of(values, "tie_word_embeddings", source), {"mlp_gated": False, "activation": "relu2"}
    config = config_of(values, source, qk_norm=True, tie_word_embeddings=False, **how, **capped)
    names = {"mlp.gate_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    return Fold(config, names, plain_norms=True, normed=True, backwards=True, tied=tied)


def _ministral(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, **sliding_of(values, source, 0)))


def _seed_oss(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, attention_output_bias=bool(values.get("attention_out_bias"))))


def _mistral(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, sliding_window=values.get("sliding_window")))


# What transformers assumes when a config.json leaves the field out.
_MISTRAL = Family(
    _mistral,
    {
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
)
_GLM: Values = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_FAMILIES: dict[str, Family] = (
    {
        "bitnet": Family(
            _bitnet,
            {
                "max_position_embeddings": 2048,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 5,
                "rope_theta": 500000.0,
                "attention_bias": False,
            },
            ("relu2",),
        ),
        "arcee": Family(_arcee, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, ("relu2",)),
        "apertus": Family(
            _apertus,
            {
                "max_position_embeddings": 65536,
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 12e6,
                    "factor": 8.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            ("xielu",),
        ),
        "smollm3": Family(
            _smollm3,
            {
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "no_rope_layer_interval": 4,
                "tie_word_embeddings": True,
                "rope_theta": 2e6,
            },
        ),
        "olmo2": Family(_olmo2, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
        "olmo3": Family(
            _olmo3,
            {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
        ),
        "phi3": Family(_phi3, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
        "exaone4": Family(_exaone4, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_key_value_heads": 32}),
        "glm": Family(_glm, _GLM),
        "glm4": Family(_glm, _GLM),
        "helium": Family(
            _interleaved,
            {
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-8,
                "num_key_value_heads": 20,
                "head_dim": 128,
                "rope_theta": 100000.0,
            },
        ),
        "ernie4_5": Family(
            _interleaved,
            {
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
            },
        ),
        "ministral": Family(
            _ministral, {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
        ),
        "internlm3": Family(
            _internlm3,
            {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128},
            also="LlamaForCausalLM",
        ),
        "iquestcoder": Family(
            _iquestcoder,
            {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128},
            also="LlamaForCausalLM",
        ),
        "cwm": Family(
            _cwm,
            {
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "sliding_window": 8192,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                },
                "bos_token_id": 128000,
                "eos_token_id": [128001, 128008, 128009],
            },
        ),
        "ministral3": Family(
            _ministral3,
            {
                "max_position_embeddings": 262144,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 16.0,
                    "original_max_position_embeddings": 16384,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale_all_dim": 1.0,
                    "mscale": 1.0,
                },
            },
        ),
        "nanochat": Family(
            _nanochat,
            {"max_position_embeddings": 2048, "final_logit_softcapping": 15.0, "tie_word_embeddings": False},
            ("relu2",),
        ),
        "youtu": Family(_youtu, {"max_position_embeddings": 131072, "tie_word_embeddings": True}),
        "seed_oss": Family(
            _seed_oss,
            {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        ),
    }
    | CENTRED
    | COHERES
    | HUNYUANS
    | GEMMAS
    | GRANITES
    | EXPERTS
    | GPT_OSS
    | LEARNED
    | LFM2S
    | GATED
    | PHIMOE
)
