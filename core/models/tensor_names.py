"""Names and shapes of a decoder's weights, as Hugging Face stores them."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig

MAX_LAYERS = 10_000  # a damaged number must not fill the memory with names


def check_layers(num_hidden_layers: int, source: str) -> None:
    """Refuse more layers than any model has.

    Raises:
        InputError: names `source`.
    """
    if num_hidden_layers > MAX_LAYERS:
        raise InputError(f"{source}: num_hidden_layers={num_hidden_layers} is above {MAX_LAYERS}; the file is damaged")


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of every weight of `config`, in the order of computation; a linear weight is (out, in).

    Tied embeddings appear once, as `model.embed_tokens.weight`.

    Raises:
        InputError: more layers than any model has.
    """
    check_layers(config.num_hidden_layers, config.model_type)
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    linears = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes
