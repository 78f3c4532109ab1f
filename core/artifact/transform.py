"""How the layers of a decoder's artifact were changed before they were rounded, so that adapters of its original fit.

A recipe may rotate the residual stream and the value heads, fold the weights of norms and divide channels. All of it is
linear: a weight W became out · W · in, with matrices that do not depend on W. What an adapter adds, B A, becomes the
same way (out · B) (A · in), of any rank. The matrices follow from a few vectors, which the artifact keeps in

    transform/layers.safetensors
        rotation.residual, rotation.head           signs of the rows of the two rotations; none: not rotated
        model.layers.0.input_layernorm.folded      (E,) the norm's weight, which is in the layers that read it now
        model.layers.0.mlp.down_proj.divided       (K,) what the input of the layer is divided by

in a folder of its own, because loaders take each safetensors file beside `config.json` for weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from penjing.core.checkpoint.safetensors_writer import save_tensors
from penjing.core.errors import InputError
from penjing.core.models.config import DecoderConfig

FILE = Path("transform") / "layers.safetensors"
RESIDUAL, HEAD = "rotation.residual", "rotation.head"
INPUTS: Mapping[str, tuple[str, ...]] = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.g_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "conv.in_proj": ("conv.in_proj",),
    "conv.out_proj": ("conv.out_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
"""Layers that read the same input, by the first of them, under whose name it stands what their input is divided by."""
NORMS: Mapping[str, tuple[str, ...]] = {
    "input_layernorm": ("self_attn.q_proj", "conv.in_proj"),
    "post_attention_layernorm": ("mlp.gate_proj",),
}
"""A norm, and the first of the layers that read it: of attention, or of the convolution in its place."""
_FIRST = {layer: first for first, layers in INPUTS.items() for layer in layers}
_NORM_OF = {first: norm for norm, readers in NORMS.items() for first in readers}


def behind_gate(divided_K: Tensor) -> Tensor:
    """(3K,) what a convolution's projection of its input is divided by where what enters the next one is, by (K,)."""
    ones_K = torch.ones_like(divided_K)
    return torch.cat((ones_K, divided_K, ones_K))


def flat_matrix(size: int) -> Tensor:
    """An orthogonal (size, size) float64 matrix whose entries are all about 1/√size; those of column 0 are positive.

    The Kronecker product of a Hadamard matrix (the power of two in `size`) and a Hartley matrix (the odd rest): flat
    for every size; Hadamard matrices alone exist for few. Part of the format of artifacts, so that it never changes.
    """
    odd = size
    while odd % 2 == 0:
        odd //= 2
    index = torch.arange(odd, dtype=torch.float64)
    angle = 2 * math.pi / odd * torch.remainder(torch.outer(index, index), odd)
    matrix = (torch.cos(angle) + torch.sin(angle)) / math.sqrt(odd)
    butterfly = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    for _ in range((size // odd).bit_length() - 1):
        matrix = torch.kron(butterfly, matrix)
    return matrix


class LayerTransforms:
    """The changes of an artifact's layers, for matrices beside their weights.

    Args:
        config: of the artifact.
        vectors: by the names above, each of the shape that they have there.
    """

    def __init__(self, config: DecoderConfig, vectors: Mapping[str, Tensor]) -> None:
        self._config, self._vectors = config, vectors
        self._residual_EE, self._head_DD = (
            vectors[name].double()[:, None] * flat_matrix(len(vectors[name])) if name in vectors else None
            for name in (RESIDUAL, HEAD)
        )

    def reading(self, module: str, matrix_RK: Tensor) -> Tensor:
        """(R, K) float64 that gives of the artifact's inputs of the linear layer `module` what `matrix_RK` gives of
        those that the original's has."""
        prefix, layer = _split(module)
        first, found_RK = _FIRST[layer], matrix_RK.double()
        norm = _NORM_OF.get(first)
        if norm is not None and self._residual_EE is not None:
            found_RK = (found_RK * self._vectors[f"{prefix}.{norm}.folded"].double()) @ self._residual_EE
        if layer == "self_attn.o_proj" and self._head_DD is not None:
            found_RK = (found_RK.unflatten(1, (-1, len(self._head_DD))) @ self._head_DD).flatten(1)
        divided_K = self._vectors.get(f"{prefix}.{first}.divided")
        return found_RK if divided_K is None else found_RK * divided_K.double()

    def giving(self, module: str, matrix_NR: Tensor) -> Tensor:
        """(N, R) float64 that gives what the linear layer `module` of the artifact gives, where `matrix_NR` gives what
        the original's does."""
        prefix, layer = _split(module)
        found_NR = matrix_NR.double()
        if layer in ("self_attn.o_proj", "conv.out_proj", "mlp.down_proj"):
            return found_NR if self._residual_EE is None else self._residual_EE.t() @ found_NR
        divided_N = None
        vectors = {} if self._config.inner_norms else self._vectors  # else the norm before o_proj or down_proj divides
        if layer == "self_attn.v_proj":
            if self._head_DD is not None:
                found_NR = (self._head_DD.t() @ found_NR.unflatten(0, (-1, len(self._head_DD)))).flatten(0, 1)
            divided_K = None if self._config.value_norm else vectors.get(f"{prefix}.self_attn.o_proj.divided")
            if divided_K is not None:
                # The query heads of a value head share its scales.
                divided_N = divided_K.view(self._config.num_key_value_heads, -1, self._config.head_dim)[:, 0].flatten()
        elif layer == "conv.in_proj":
            if (divided_K := vectors.get(f"{prefix}.conv.out_proj.divided")) is not None:
                divided_N = behind_gate(divided_K)
        elif layer == "mlp.up_proj":
            divided_N = vectors.get(f"{prefix}.mlp.down_proj.divided")
        return found_NR if divided_N is None else found_NR / divided_N.double()[:, None]


def write_transforms(folder: Path, vectors: Mapping[str, Tensor]) -> None:
    """Keep `vectors`, named as above, in the artifact's folder, which is not yet published; nothing where there are
    none."""
    if vectors:
        (folder / FILE).parent.mkdir()
        save_tensors({name: vector.contiguous() for name, vector in vectors.items()}, folder / FILE)


def read_transforms(folder: Path, config: DecoderConfig) -> LayerTransforms | None:
    """The changes that the artifact in `folder` keeps; None where it keeps none.

    Raises:
        InputError: damaged, or not of this network.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        vectors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); make the artifact again") from error
    sizes = dict(_sizes(config))
    for name, vector in vectors.items():
        if sizes.get(name) != tuple(vector.shape) or not bool(vector.double().isfinite().all()):
            raise InputError(f"{path}: {name:.100} does not belong to this network; make the artifact again")
    heads = config.rotates_values
    wanted = [name for name in sizes if (name == HEAD and heads) or name.endswith(".folded")]
    wanted = wanted if RESIDUAL in vectors else []
    if lost := [name for name in wanted if name not in vectors]:
        raise InputError(f"{path} has no {lost[0]}; make the artifact again")
    return LayerTransforms(config, vectors)


def _sizes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int]]]:
    """The names that there can be, and the shape of each."""
    yield RESIDUAL, (config.hidden_size,)
    yield HEAD, (config.head_dim,)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        widths = dict.fromkeys(INPUTS, config.hidden_size) | {
            "self_attn.o_proj": config.num_attention_heads * config.head_dim,
            "mlp.down_proj": config.ffn_size(layer),
        }
        for norm in NORMS:
            yield f"{prefix}.{norm}.folded", (config.hidden_size,)
        for first in INPUTS:
            yield f"{prefix}.{first}.divided", (widths[first],)


def _split(module: str) -> tuple[str, str]:
    """ "model.layers.3.mlp.up_proj" → "model.layers.3" and "mlp.up_proj"."""
    layer = ".".join(module.split(".")[-2:])
    return module.removesuffix(f".{layer}"), layer
