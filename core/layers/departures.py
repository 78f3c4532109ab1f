"""Fields of `DecoderConfig` by which a layer departs from those of all Hugging Face types of `hf_config`."""

DEPARTURES = (
    "qk_norm_over",
    "qk_norm_rotated",
    "norms",
    "inner_norms",
    "activation",
    "mlp_gated",
    "parallel",
    "head_bias",
    "attention_cap",
    "attention_sinks",
    "attention_gate",
    "logit_cap",
    "layer_rotary",
    "rotary_pairs",
    "rotary_local_pairs",
    "learned_positions",
    "table_hadamard",
    "conv_taps",
)
BESIDE_EXPERTS = (
    "attention_sinks",
    "attention_gate",
    "qk_norm_over",
    "qk_norm_rotated",
    "layer_rotary",
    "rotary_pairs",
    "rotary_local_pairs",
    "norms",
    "parallel",
    "head_bias",
    "table_hadamard",
    "conv_taps",
)
"""Those of what stands around experts."""
