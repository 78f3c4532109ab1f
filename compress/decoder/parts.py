"""Which linear layers of a decoder layer read the same activations, with experts or without.

Everything follows from the names of the layer's tensors: "mlp.up_proj.weight" of a plain MLP, "mlp.experts.3.up_proj.
weight" of an expert, "mlp.shared_experts.…" of the MLP that all tokens take beside them, "mlp.gate.weight" of a router,
"conv.in_proj.weight" of a short convolution.
"""

from __future__ import annotations

from collections.abc import Iterable

ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
"""Linear layers that choose and weigh experts. They stay floating, as every engine has them."""
TOKENS = ("token.gate_proj", "token.out_proj")
"""What takes something of a token behind the MLP."""
_DOWN = ".down_proj.weight"


def mlps(names: Iterable[str]) -> list[str]:
    """The MLPs among the tensors `names` of a layer, such as "mlp" or "mlp.experts.3"."""
    return [name.removesuffix(_DOWN) for name in names if name.endswith(_DOWN)]


def gate_up(names: Iterable[str], mlp: str) -> tuple[str, ...]:
    """The linear layers of `mlp` that read its input: no up_proj where it has no gate to be multiplied by."""
    both = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    return both if f"{both[1]}.weight" in names else both[:1]


def mixer(names: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """What reads the input of a layer's attention, or of the convolution in its place, and the linear layer that gives
    its result."""
    if "conv.in_proj.weight" in names:
        return ("conv.in_proj",), "conv.out_proj"
    readers = tuple(f"self_attn.{part}_proj" for part in "qkvg")
    return tuple(reader for reader in readers if f"{reader}.weight" in names), "self_attn.o_proj"


def is_routed(name: str) -> bool:
    """Whether the MLP or linear layer `name` sees only the tokens that a router sends it."""
    return name.startswith("mlp.experts.")


def norm_readers(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The norms before the halves of a layer with tensors `names`, if any, and the linear layers that read each.
    Calibration sees the input of the first of them."""
    names = set(names)
    routers = [name for name in ROUTERS if f"{name}.weight" in names]
    inner = [linear for mlp in sorted(mlps(names)) for linear in gate_up(names, mlp)]
    readers = {
        "input_layernorm": mixer(names)[0],
        "post_attention_layernorm": (*routers, *inner),
    }
    return {norm: linears for norm, linears in readers.items() if f"{norm}.weight" in names}


def inner_norm(names: Iterable[str], linear: str) -> str | None:
    """The norm whose output the last layer of attention or MLP, `linear`, reads, if the layer with tensors `names` has
    it."""
    norm = {"self_attn.o_proj": "self_attn.attn_sub_norm", "mlp.down_proj": "mlp.ffn_sub_norm"}.get(linear)
    return norm if f"{norm}.weight" in names else None


def same_input(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Linear layers that become INT8 and read the same activations, by the first of them."""
    names = set(names)
    readers, out = mixer(names)
    groups = {readers[0]: readers, out: (out,)}
    for mlp in mlps(names):
        groups[f"{mlp}.gate_proj"] = gate_up(names, mlp)
        groups[f"{mlp}.down_proj"] = (f"{mlp}.down_proj",)
    return groups | {name: (name,) for name in TOKENS if f"{name}.weight" in names}
