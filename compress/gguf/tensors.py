"""The tensors of an artifact as blocks of a GGUF file, where `Written` places them, with the artifact's integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.compress.gguf.architecture import Written, stored_names
from penjing.compress.gguf.blocks import BLOCK, q8_0
from penjing.compress.gguf.centred import LARGEST_REST, check_mean, shift_of
from penjing.compress.gguf.four_bits import four_bit_blocks, near_halves
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import InputError
from penjing.core.folded.placement import Placement
from penjing.core.gguf.names import tensor_of
from penjing.core.models.tensor_names import tensor_shapes
from penjing.core.runtime.embedding import stored_table
from penjing.core.runtime.schemes import has_int8_embedding

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
BESIDE = ("_scale", "_shape", "_step", "_offset", "_channel")  # ends of what belongs to a weight
Block = tuple[NDArray[Any], Any]  # bytes or numbers, and their type


class WrittenTensors:
    """What a file of `checkpoint` holds; each tensor is made when it is asked for.

    Raises:
        InputError: the network has what a file as `written` has no place for (named).
    """

    def __init__(self, checkpoint: Checkpoint, written: Written) -> None:
        self._checkpoint, self.written = checkpoint, written
        self._fold, self._placement = written.fold, Placement(written.fold)
        self._shapes = tensor_shapes(written.fold.config)
        self._there = frozenset(checkpoint.tensor_names)
        config = checkpoint.config
        self._smoothed = has_int8_embedding(checkpoint.quantization) and config.tie_word_embeddings
        if written.architecture.layer_norm:
            check_mean(self._shapes, self._float, str(checkpoint.folder))
        self._check_left_out()
        self._check_shared()
        self._shifts = self._find_shifts()

    def __iter__(self) -> Iterator[tuple[str, NDArray[Any], Any]]:
        """Name in the file, bytes and type of every tensor, one at a time."""
        import gguf

        for name, divisors in self.written.divisors.items():
            yield name, divisors, gguf.GGMLQuantizationType.F32
        stacks: dict[str, list[str]] = {}
        for theirs, ours in stored_names(self.written).items():
            stack, expert = tensor_of(theirs)
            if expert is None:
                yield theirs, *self._joined(theirs, ours)
            else:
                stacks.setdefault(stack, []).extend(ours)
        for theirs, ours in stacks.items():
            parts = [self._tensor(name) for name in ours]
            self._check_kinds(theirs, parts)
            yield theirs, np.stack([data for data, _ in parts]), parts[0][1]

    def _joined(self, theirs: str, ours: list[str]) -> Block:
        """The tensor that holds those of ours: one, parts below each other, or one that all of them are."""
        if len(ours) == 1:
            return self._tensor(ours[0])
        if self._placement.place(ours[0])[1] is not None:
            parts = [self._tensor(name) for name in ours]
            self._check_kinds(theirs, parts)
            return np.concatenate([data for data, _ in parts]), parts[0][1]
        return self._tensor(HEAD if HEAD in ours else ours[0])

    def _check_kinds(self, theirs: str, parts: list[Block]) -> None:
        if len({kind for _, kind in parts}) > 1:
            raise InputError(
                f"{self._checkpoint.folder}: of {theirs} some parts are of one type and some of another, and GGUF "
                "has one for all of them; quantize all alike, or keep all"
            )

    def _check_left_out(self) -> None:
        """Raise InputError if a tensor without a place in the file is more than that place's absence says."""
        for name in self._shapes:
            if self._placement.holds(name) or name not in self._there:
                continue
            norm = name.endswith("norm.weight")
            if norm or name.endswith(("o_proj.bias", "down_proj.bias")):
                tensor = self._checkpoint.get(name).float()
                if not torch.allclose(tensor, torch.full_like(tensor, float(norm)), atol=1e-6):
                    self._refuse(name)

    def _check_shared(self) -> None:
        """Raise InputError if tensors differ that are one in the file. Of an LM head that is the embedding the first
        norm takes away the mean of each row."""
        for ours in stored_names(self.written).values():
            if len(ours) == 1 or ours[0] not in self._shapes or self._placement.place(ours[0])[1] is not None:
                continue
            if HEAD in ours:
                head, table = self._float(HEAD), self._float(EMBEDDING)
                if (head - head.mean(dim=1, keepdim=True) - table).norm() > LARGEST_REST * table.norm():
                    self._refuse("an LM head that is not its embedding")
                continue
            first, *others = (self._float(name) for name in ours)
            if any(not torch.allclose(first, other, rtol=1e-3, atol=1e-6) for other in others):
                self._refuse(f"different tensors {' and '.join(ours)}")

    def _find_shifts(self) -> dict[str, Tensor]:
        """Name of a norm's bias → what it adds where biases behind it have no place in the file."""
        names = [name for ours in stored_names(self.written).values() for name in ours if name not in self._shapes]
        lost = {name: self._lost_biases(name) for name in names}
        return {name: shift_of(biases, self._float, self._refuse) for name, biases in lost.items() if biases}

    def _refuse(self, what: str) -> None:
        raise InputError(
            f"{self._checkpoint.folder} has {what}, which {self.written.architecture.name}, the GGUF architecture of "
            "the rest of it, has not, and so it is not written as GGUF; penjing serves the artifact as it is"
        )

    def _float(self, name: str) -> Tensor:
        """A tensor that may be in integers, or be absent, in float32."""
        import gguf

        if name not in self._there and f"{name}_packed" not in self._there:
            return torch.zeros(self._shapes[name])
        get = self._checkpoint.get
        if f"{name}_packed" in self._there:
            data, kind = self._four_bits(name, None, None)
            return torch.from_numpy(gguf.dequantize(data, kind))
        value = get(name).float()
        return value * get(f"{name}_scale").float().view(-1, 1) if f"{name}_scale" in self._there else value

    def _tensor(self, name: str) -> Block:
        import gguf

        order, factor = self._placement.arranged(name)
        order = None if order is None else torch.argsort(order)
        factor = None if factor is None else (1 / factor).float()
        if factor is not None and order is not None and len(factor) > 1:
            factor = factor[order]
        if name not in self._shapes:  # the bias of a norm
            shift = self._shifts.get(name, torch.zeros(self._fold.config.hidden_size))
            return shift.numpy(), gguf.GGMLQuantizationType.F32
        if self._smoothed and name in (EMBEDDING, FINAL_NORM):
            return self._without_smoothing(name, factor)
        packed = f"{name}_packed"
        if packed in self._there:
            return self._four_bits(name, order, factor)
        if name not in self._there:
            return np.zeros(self._shapes[name], np.float32), gguf.GGMLQuantizationType.F32
        weight = self._checkpoint.get(name)
        weight = weight if order is None else weight[order]
        if weight.dtype == torch.int8:
            scale = self._checkpoint.get(f"{name}_scale").to(torch.float32).flatten()
            scale = scale if order is None else scale[order]
            scale = scale if factor is None else scale * factor
            return q8_0(weight.contiguous().numpy(), scale.numpy()), gguf.GGMLQuantizationType.Q8_0
        if factor is not None:
            weight = weight.float() * factor.view(-1, *[1] * (weight.dim() - 1))
        return self._floating(name, weight)

    def _lost_biases(self, name: str) -> list[str]:
        """Modules that read the norm of the bias `name` and whose own biases have no place in the file."""
        norm = name.removesuffix(".bias")
        place = norm.rpartition(".")[0]
        readers = {
            "model.norm": ["lm_head"],
            f"{place}.input_layernorm": [f"{place}.self_attn.{each}_proj" for each in "qkv"],
            f"{place}.post_attention_layernorm": [f"{place}.mlp.{each}_proj" for each in ("gate", "up")],
        }
        biases = [f"{module}.bias" for module in readers[norm]]
        return [bias for bias in biases if bias in self._there and not self._placement.holds(bias)]

    def _floating(self, name: str, weight: Tensor) -> Block:
        import gguf

        if name.endswith((".shared_expert_gate.weight", "conv.taps.weight")):
            weight = weight.squeeze(0 if weight.dim() == 2 else 1)
        # A router chooses by small differences, and llama.cpp's convolution takes no others.
        if weight.dim() == 1 or name.endswith((".mlp.gate.weight", "conv.taps.weight")):
            return weight.to(torch.float32).numpy(), gguf.GGMLQuantizationType.F32
        halves = weight.to(torch.float16)
        if not torch.isfinite(halves).all():
            raise InputError(
                f"{self._checkpoint.folder}: {name} holds {float(weight.abs().max()):g}, beyond float16, as GGUF "
                "stores what is not in INT8; export --to onnx or compressed-tensors keeps it as it is"
            )
        return halves.numpy(), gguf.GGMLQuantizationType.F16

    def _four_bits(self, name: str, order: Tensor | None, factor: Tensor | None) -> Block:
        import gguf

        rows = slice(None) if order is None else order
        ends = [end for end in ("scale", "offset", "step") if f"{name}_{end}" in self._there]
        parts = [self._checkpoint.get(f"{name}_{end}")[rows].to(torch.float32) for end in ends]
        scale, *offset = parts
        if "step" in ends:  # whole numbers on top of the scale of a row
            scale, offset = scale * offset[1], [scale * offset[0]]
        if factor is not None:
            scale, offset = scale * factor.view(-1, 1), [each * factor.view(-1, 1) for each in offset]
        numbers = [part.numpy() for part in (scale, *offset)]
        if "step" in ends or factor is not None:
            numbers = [near_halves(each) for each in numbers]
        weight = self._checkpoint.get(f"{name}_packed")[rows].contiguous().numpy()
        said = f"{self._checkpoint.folder}: {name}"
        data, kind = four_bit_blocks(weight, numbers[0], numbers[1] if offset else None, said)
        return data, gguf.GGMLQuantizationType[kind]

    def _without_smoothing(self, name: str, factor: Tensor | None) -> Block:
        """The table of embedding and LM head, or the last norm, as before the norm divided what the head reads."""
        import gguf
        from gguf.quants import quantize

        table, many = stored_table(self._checkpoint.get, tied=True), 1.0 if factor is None else factor
        assert table.channel_E is not None  # a tied one has it
        if name == FINAL_NORM:
            norm = self._checkpoint.get(name).float() / table.channel_E * many
            return norm.numpy(), gguf.GGMLQuantizationType.F32
        kind, rows = gguf.GGMLQuantizationType.Q8_0, torch.arange(len(table.weight_VE)).split(8192)
        if table.weight_VE.shape[1] % BLOCK:
            raise InputError(f"rows of {table.weight_VE.shape[1]} channels are no blocks of {BLOCK}, which Q8_0 needs")
        return np.concatenate([quantize((table.rows(part) * many).numpy(), kind) for part in rows]), kind
