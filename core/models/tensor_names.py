"""Names and shapes of a decoder's weights, in the model and as Hugging Face stores them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig

POSITIONS = "model.embed_positions.weight"
TOKEN_INPUTS = "model.embed_inputs.weight"
MAX_LAYERS = 10_000  # a damaged number must not fill the memory with names
MAX_EXPERTS = 200_000  # over all layers; DeepSeek-V3 has 14 848
_OF_KEYS = tuple(f"self_attn.{part}_" for part in "kv")  # what layers without keys of their own have not
# Of all experts of a layer: (experts, rows, inputs), the rows of gate above those of up.
_STACK = re.compile(r"(.+)\.experts\.(gate_up_proj|down_proj)|(.+\.block_sparse_moe)\.(input|output)_linear\.weight")


def check_layers(num_hidden_layers: int, source: str) -> None:
    """Refuse more layers than any model has.

    Raises:
        InputError: names `source`.
    """
    if num_hidden_layers > MAX_LAYERS:
        raise InputError(f"{source}: num_hidden_layers={num_hidden_layers} is above {MAX_LAYERS}; the file is damaged")


def stored_name(config: DecoderConfig, name: str) -> str:
    """The name under which a checkpoint of this type stores the tensor `name` of the model."""
    for ours, theirs in _renamed(config):
        name = name.replace(ours, theirs)
    return name


def model_name(config: DecoderConfig, stored: str) -> str:
    """Undo `stored_name`."""
    for ours, theirs in _renamed(config):
        stored = stored.replace(theirs, ours)
    return stored


def _renamed(config: DecoderConfig) -> tuple[tuple[str, str], ...]:
    if config.model_type == "mixtral":
        return (
            (".mlp.", ".block_sparse_moe."),
            (".gate_proj.", ".w1."),
            (".down_proj.", ".w2."),
            (".up_proj.", ".w3."),
        )
    if config.model_type == "qwen2_moe":
        return ((".mlp.shared_experts.", ".mlp.shared_expert."),)
    return ((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),)


@dataclass(frozen=True)
class Slice:
    """Where the weight of one expert lies in a folder that holds all of a layer together: as transformers 5 keeps them,
    and may save them, and as Granite's were published.

    Attributes:
        stored: the tensor of all of them.
        part: which of `parts` equal blocks of its rows it is.
    """

    stored: str
    expert: int
    part: int
    parts: int

    def shape_in(self, stack: tuple[int, ...], num_experts: int) -> tuple[int, int] | None:
        """(rows, inputs) of the weight; None where a stack of this shape does not hold so many experts."""
        if len(stack) != 3 or stack[0] != num_experts or stack[1] % self.parts:
            return None
        return stack[1] // self.parts, stack[2]


def experts_in(stored: str, num_experts: int) -> dict[str, Slice]:
    """Name of each expert's weight, as if it were stored by itself → its place in the tensor `stored`; none where that
    is no stack."""
    found = _STACK.fullmatch(stored)
    if found is None:
        return {}
    block, is_down = found[1] or found[3], found[2] == "down_proj" or found[4] == "output"
    kinds = ("down_proj",) if is_down else ("gate_proj", "up_proj")
    return {
        f"{block}.experts.{expert}.{kind}.weight": Slice(stored, expert, part, len(kinds))
        for expert in range(num_experts)
        for part, kind in enumerate(kinds)
    }


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name in the model → shape of every weight of `config`, in the order of computation; a linear weight is (out, in).

    Tied embeddings appear once, as `model.embed_tokens.weight`; shared layers once, as `model.layers.0`.

    Raises:
        InputError: more layers or experts than any model has.
    """
    check_layers(config.num_hidden_layers, config.model_type)
    num_experts = config.num_hidden_layers * (config.moe.num_experts if config.moe is not None else 0)
    if num_experts > MAX_EXPERTS:
        raise InputError(f"{config.model_type}: {num_experts} experts are above {MAX_EXPERTS}; the file is damaged")
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    if config.learned_positions:
        shapes[POSITIONS] = (config.max_position_embeddings, hidden)
    if config.token_inputs:
        shapes[TOKEN_INPUTS] = (config.vocab_size * config.num_hidden_layers, config.token_inputs)
    for layer in (0, *range(config.shared_layers, config.num_hidden_layers)):
        mixer = _conv_shapes(config) if config.is_conv(layer) else _attention_shapes(config, layer)
        names = mixer | _mlp_shapes(config, layer)
        before, after = ("input_layernorm", "post_attention_layernorm"), ("attention_output_norm", "mlp_output_norm")
        norms = (before if config.norms != "after" else ()) + (after if config.norms != "before" else ())
        ordered = {f"{norm}.weight": (hidden,) for norm in norms[:1]} | names
        ordered |= {f"{norm}.weight": (hidden,) for norm in norms[1:]}
        if width := config.token_inputs:
            ordered |= _linear("token.gate_proj", width, hidden, False) | _linear(
                "token.out_proj", hidden, width, False
            )
            ordered["token.norm.weight"] = (hidden,)
        ordered |= {"layer_scale": (1,)} if config.layer_scales else {}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in ordered.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes |= _linear("lm_head", config.vocab_size, hidden, config.head_bias)
    return shapes


def _attention_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    if (latent := config.latent_attention) is not None:
        rank, expanded = latent.kv_lora_rank, latent.qk_nope_head_dim + latent.v_head_dim
        if latent.q_lora_rank is None:
            query = {"q_proj": (heads * head_dim, hidden)}
        else:
            query = {
                "q_a_proj": (latent.q_lora_rank, hidden),
                "q_a_layernorm": (latent.q_lora_rank,),
                "q_b_proj": (heads * head_dim, latent.q_lora_rank),
            }
        key_value = {
            "kv_a_proj_with_mqa": (rank + latent.qk_rope_head_dim, hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * expanded, rank),
            "o_proj": (hidden, heads * latent.v_head_dim),
        }
        return {f"self_attn.{name}.weight": shape for name, shape in (query | key_value).items()}
    query, key, bias = heads * head_dim, config.num_key_value_heads * head_dim, config.attention_bias
    shapes = (
        _linear("self_attn.q_proj", query, hidden, bias)
        | _linear("self_attn.k_proj", key, hidden, bias)
        | _linear("self_attn.v_proj", key, hidden, bias)
        | _linear("self_attn.o_proj", hidden, query, config.attention_output_bias)
    )
    if config.attention_gate is not None:
        shapes |= _linear("self_attn.g_proj", config.gate_size, hidden, False)
    if config.attention_sinks:
        shapes["self_attn.sinks"] = (heads,)
    if config.inner_norms:
        shapes["self_attn.attn_sub_norm.weight"] = (query,)
    if config.value_norm:
        shapes["self_attn.v_norm.weight"] = (head_dim,)
    if config.qk_norm:
        whole = config.qk_norm_over == "all"
        sizes = {"q": query if whole else head_dim, "k": key if whole else head_dim}
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name, size in sizes.items()}
    if config.keys_of(layer) != layer:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(_OF_KEYS)}
    return shapes


def _conv_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, bias = config.hidden_size, config.conv_bias
    shapes = _linear("conv.in_proj", 3 * hidden, hidden, bias) | {"conv.taps.weight": (hidden, 1, config.conv_taps)}
    return shapes | ({"conv.taps.bias": (hidden,)} if bias else {}) | _linear("conv.out_proj", hidden, hidden, bias)


def _mlp_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    if config.moe is None or not config.is_moe(layer):
        dense = _gated("mlp", hidden, config.ffn_size(layer), config.mlp_bias)
        curve = {f"mlp.act_fn.{name}": (1,) for name in ("alpha_p", "alpha_n")} if config.activation == "xielu" else {}
        norm = {"mlp.ffn_sub_norm.weight": (config.ffn_size(layer),)} if config.inner_norms else {}
        parts = {name: shape for name, shape in dense.items() if config.mlp_gated or "up_proj" not in name}
        return parts | curve | norm
    moe = config.moe
    shapes = _linear("mlp.gate", moe.num_experts, hidden, moe.biases)
    if moe.router_bias:
        shapes["mlp.e_score_correction_bias"] = (moe.num_experts,)
    for expert in range(moe.num_experts):
        shapes |= _gated(f"mlp.experts.{expert}", hidden, moe.moe_intermediate_size, moe.biases)
    if moe.shared_expert_intermediate_size:
        shapes |= _gated("mlp.shared_experts", hidden, moe.shared_expert_intermediate_size)
    if moe.output_norms:
        shapes |= {f"mlp.{name}_output_norm.weight": (hidden,) for name in ("experts", "shared")}
    if moe.shared_expert_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gated(name: str, hidden: int, inner: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    return (
        _linear(f"{name}.gate_proj", inner, hidden, bias)
        | _linear(f"{name}.up_proj", inner, hidden, bias)
        | _linear(f"{name}.down_proj", hidden, inner, bias)
    )


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})
