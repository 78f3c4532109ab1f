"""Reads a `.gguf` file of an architecture of `table`: its network, and its weights under our names in float32.

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md) for names; `network` says how a file holds its network, in
which rows of q and k may be in the order of interleaved rotary pairs and factors may be apart from the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penjing.core.errors import InputError
from penjing.core.folded.placement import WRITERS, Placement
from penjing.core.gguf.names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, tensor_of
from penjing.core.gguf.network import GgufNetwork
from penjing.core.models.tensor_names import tensor_shapes

_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")
_MAGIC = b"GGUF"


class GgufFile(GgufNetwork):
    """A `.gguf` file opened for reading (memory-mapped).

    Raises:
        InputError: missing, truncated, not GGUF, of another architecture (named), or with tensors missing.
    """

    def __init__(self, path: Path) -> None:
        reader = _read(path)
        fields: dict[str, Any] = {name: _contents(path, field) for name, field in reader.fields.items()}
        if (parts := fields.get("split.count", 1)) != 1:
            raise InputError(
                f"{path} is one of {parts} parts; join them by llama.cpp's 'llama-gguf-split --merge FIRST_PART "
                "OUT.gguf', and import what comes out"
            )
        super().__init__(path, fields, {tensor.name: tensor for tensor in reader.tensors})
        self._placement = Placement(self.fold)
        self._shapes = tensor_shapes(self.config)
        self._check_tensors()

    @property
    def license(self) -> str:
        """SPDX-like name of the weights' license, or "unknown"."""
        return str(self.fields.get("general.license", "unknown"))

    @property
    def num_tensors(self) -> int:
        """Number of weights that `tensors` yields."""
        return len(self._shapes)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the model, float32 tensor), dequantized one at a time.

        Raises:
            InputError: a tensor has a quantization type that the gguf package cannot read (named).
        """
        return ((name, self.get(name)) for name in self._shapes)

    def get(self, name: str) -> torch.Tensor:
        """The tensor of that name in float32; raises as `tensors`."""
        shape = self._shapes[name]
        return self._placement.get(name, self._stored, self._shapes.__getitem__).reshape(shape).contiguous()

    def kind(self, name: str) -> str:
        """The type in which the tensor of that name is stored, such as "Q4_K"."""
        return self._tensors[tensor_of(self._placement.place(name)[0])[0]].tensor_type.name

    def is_whole(self, name: str) -> bool:
        """Whether the matrix of that name is stored as it is, but for the order of its rows."""
        mean = self.fold.centred and name.rpartition(".")[0].endswith(WRITERS)
        return not mean and self._placement.arranged(name)[1] is None

    def rows(self, name: str) -> torch.Tensor:
        """(N, bytes) uint8: the rows of a quantized matrix as they are stored, in the order that they have here."""
        theirs, part = self._placement.place(name)
        data = torch.from_numpy(np.array(self._tensors[theirs].data))
        order, _ = self._placement.arranged(name)
        data = data if part is None else part.of(data)
        return data if order is None else data[order]

    def _stored(self, theirs: str) -> torch.Tensor:
        """A tensor of the file, or of one expert, in float32."""
        import gguf

        name, expert = tensor_of(theirs)
        tensor = self._tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values = gguf.dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise InputError(
                f"{self.path}: {name} has the type {kind}, which the gguf package cannot dequantize; "
                "get the file in another type, for example Q8_0 or F16"
            ) from None
        # a copy: F32 data is a view of the read-only map
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _check_tensors(self) -> None:
        """Raise InputError unless the file holds the tensors of its network and no others."""
        rotary = (
            ROPE_FACTORS,
            *((LONG_FACTORS, SHORT_FACTORS) if self.config.rope_scaling.rope_type == "longrope" else ()),
        )
        wanted, layers = self._wanted(), self.config.num_hidden_layers
        # Layers that guess further tokens are left out.
        beyond = tuple(f"blk.{layers + more}." for more in range(self._number("nextn_predict_layers", 0)))
        others = [name for name in self._tensors if name not in wanted and name not in rotary]
        if unknown := [name for name in others if not name.startswith(beyond)]:
            raise InputError(f"{self.path}: tensor {unknown[0]!r} has no place in a {self._architecture} model")
        for theirs, (ours, shape) in wanted.items():
            if theirs not in self._tensors:
                raise InputError(f"{self.path} lacks {ours}; the file is not complete: get it again")
            stored = tuple(int(size) for size in reversed(self._tensors[theirs].shape))
            if _without_ones(stored) != _without_ones(shape):
                raise InputError(f"{self.path}: {theirs} has the shape {stored}, its metadata says {shape}")

    def _wanted(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name in the file → a name of ours that it holds, and its shape."""
        wanted: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in self._shapes.items():
            if not self._placement.holds(name):
                continue
            theirs, rows = self._placement.place(name)
            theirs, expert = tensor_of(theirs)
            if expert is not None:
                assert self.config.moe is not None
                shape = (self.config.moe.num_experts, *shape)
            if rows is not None and theirs in wanted:
                shape = (wanted[theirs][1][0] + shape[0], *shape[1:])
            wanted[theirs] = name, shape
        if "shift" in self.fold.stored:
            norms = [name for name in self._shapes if name.endswith("norm.weight")]
            for name in (f"{norm.rpartition('.')[0]}.bias" for norm in norms):
                wanted[self._placement.place(name)[0]] = name, (self.config.hidden_size,)
        return wanted


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Vectors are rows of matrices here, and convolutions have a dimension more."""
    return tuple(size for size in shape if size != 1)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as GGUF does."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _read(path: Path) -> Any:
    if not path.exists():
        raise InputError(f"{path} does not exist; give the path of a .gguf file")
    try:
        recognised = is_gguf(path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not recognised:
        raise InputError(_what_it_is(path))
    import gguf

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the parser trusts the file: a damaged one fails in any way (index, value, memory …)
        raise InputError(f"{path} is truncated or damaged ({type(error).__name__}: {error}); get it again") from error


def _what_it_is(path: Path) -> str:
    """What to do with a file that is no GGUF."""
    if path.suffix in _PICKLES:
        return (
            f"{path} is a pickle, which can run code and is not read; in Python, load it into its module once. Save a "
            "language model or text encoder with save_pretrained(FOLDER) of transformers, then 'penjing import FOLDER "
            "OUT'; of another network save the state_dict as net.safetensors, then 'penjing import file.py:function "
            "OUT --weights net.safetensors'"
        )
    if path.suffix == ".safetensors":
        return f"{path} holds weights alone; give the folder in which it lies beside its config.json"
    return f"{path} is not a GGUF file (it does not begin with 'GGUF'); give a .gguf model or a Hugging Face folder"


def _contents(path: Path, field: Any) -> Any:
    try:
        return field.contents()
    except (ValueError, IndexError, TypeError, KeyError) as error:
        raise InputError(f"{path}: the metadata {field.name!r} is damaged ({error}); get the file again") from error
