"""Reads a `.gguf` file of the Llama family or of Gemma 3: its architecture, and its weights under Hugging Face names,
dequantized to fp32.

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md) for names; llama.cpp stores the rows of q and k of the
architecture `llama` in the order of interleaved rotary pairs, which is undone here (Hugging Face rotates halves).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penjing.core.errors import InputError
from penjing.core.gguf.metadata import Metadata
from penjing.core.gguf.names import (
    END_OF_TURN,
    EXPERTS,
    GEMMA,
    LONG_FACTORS,
    PAIRED,
    ROPE_FACTORS,
    SHORT_FACTORS,
    expert_of,
    model_name_of,
)
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import NATIVE
from penjing.core.models.tensor_names import check_layers, tensor_shapes

SUPPORTED_ARCHITECTURES = (*PAIRED, "qwen2", "qwen3", "qwen2moe", "qwen3moe", GEMMA)
_PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle")
_MAGIC = b"GGUF"
_LAYERS_OF_27B = 62  # llama.cpp knows the largest Gemma 3, whose scores have a factor of their own, by this number
_SOFTMAX = 1  # expert_gating_func: how the router's outputs become scores


class GgufFile(Metadata):
    """A `.gguf` file opened for reading (memory-mapped).

    Attributes:
        path: the file.
        fields: metadata, key → value (numbers, text, lists).
        config: the architecture.

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
        super().__init__(path, fields, _check_architecture(path, fields))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config()
        self._gguf_name = self._match_names()

    @property
    def license(self) -> str:
        """SPDX-like name of the weights' license, or "unknown"."""
        return str(self.fields.get("general.license", "unknown"))

    @property
    def num_tensors(self) -> int:
        """Number of weights that `tensors` yields."""
        return len(self._gguf_name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, float32 tensor), dequantized one at a time.

        Raises:
            InputError: a tensor has a quantization type that the gguf package cannot read (named).
        """
        return ((name, self.get(name)) for name in self._gguf_name)

    def get(self, name: str) -> torch.Tensor:
        """The tensor of that Hugging Face name in float32; raises as `tensors`."""
        import gguf

        gguf_name, (_, expert) = self._gguf_name[name], expert_of(name)
        tensor = self._tensors[gguf_name]
        data = tensor.data if expert is None else tensor.data[expert]
        try:
            values = gguf.dequantize(data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise InputError(
                f"{self.path}: {gguf_name} has the type {kind}, which the gguf package cannot dequantize; "
                "get the file in another type, for example Q8_0 or F16"
            ) from None
        # a copy: F32 data is a view of the read-only map
        weight = torch.from_numpy(np.array(values, dtype=np.float32))
        if name.endswith(".shared_expert_gate.weight"):
            weight = weight.view(1, -1)  # a vector there
        return self._unpermute(name, self._scaled(name, weight))

    def kind(self, name: str) -> str:
        """The type in which the tensor of that Hugging Face name is stored, such as "Q4_K"."""
        return self._tensors[self._gguf_name[name]].tensor_type.name

    def rows(self, name: str) -> torch.Tensor:
        """(N, bytes) uint8: the rows of a quantized matrix as they are stored, in the order that they have here."""
        data = self._tensors[self._gguf_name[name]].data
        return self._unpermute(name, torch.from_numpy(np.array(data)))

    def _scaled(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Gemma's factors, which llama.cpp applies as it computes, in the weights (see `core.folded`)."""
        if self._architecture != GEMMA:
            return weight
        config = self.config
        factor = 1.0
        if name == "model.embed_tokens.weight":
            factor = config.hidden_size**0.5
        elif name == "model.norm.weight" and config.tie_word_embeddings:
            factor = config.hidden_size**-0.5
        elif name.endswith("q_norm.weight") and config.num_hidden_layers == _LAYERS_OF_27B:
            factor = (config.head_dim * config.num_attention_heads / config.hidden_size) ** 0.5
        return weight if factor == 1.0 else (weight.double() * factor).float()

    def _unpermute(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if self._architecture not in PAIRED:
            return weight
        if ".q_proj." in name:
            heads = self.config.num_attention_heads
        elif ".k_proj." in name:
            heads = self.config.num_key_value_heads
        else:
            return weight
        pairs = weight.reshape(heads, self.config.head_dim // 2, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape).contiguous()

    def _read_config(self) -> DecoderConfig:
        layers, heads = self._number("block_count"), self._number("attention.head_count")
        hidden = self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // max(heads, 1))
        rotary = self._number("rope.dimension_count", head_dim)
        if rotary != head_dim:
            raise InputError(f"{self.path}: rotates {rotary} of {head_dim} elements a head; only all are supported")
        if self._number("attention.value_length", head_dim) != head_dim:
            raise InputError(f"{self.path}: keys and values of different length are not supported")
        window = self._number("attention.sliding_window", 0) or None
        bias = "blk.0.attn_q.bias" in self._tensors
        widths = self._widths(layers)
        values = {
            "model_type": NATIVE if len(set(widths)) > 1 else self._model_type(window),
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": max(widths),
            "intermediate_sizes": widths if len(set(widths)) > 1 else None,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": self._eps(),
            "rope_theta": self._real("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": bias,
            "attention_output_bias": "blk.0.attn_output.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "qk_norm": self._architecture in ("qwen3", "qwen3moe", GEMMA),
            "moe": self._experts(max(widths)),
            "sliding_window": window,
            "bos_token_id": self.fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_ids": self._stops(),
            "pad_token_id": self.fields.get("tokenizer.ggml.padding_token_id"),
        }
        return self._parse(DecoderConfig, values | (self._gemma(layers) if self._architecture == GEMMA else {}))

    def _gemma(self, layers: int) -> dict[str, Any]:
        """What Gemma 3 has besides: every sixth layer sees all, the others a window, with rotary bases of their own."""
        for name in ("final_logit_softcapping", "attn_logit_softcapping"):
            if cap := self._real(name, 0.0):
                raise InputError(f"{self.path}: {name}={cap} is not supported")
        window = self._number("attention.sliding_window", 0)
        every = self._number("attention.sliding_window_pattern", 6)
        whole = [not window or (layer + 1) % max(every, 1) == 0 for layer in range(layers)]
        return {
            "norms": "around",
            "activation": "gelu_tanh",
            "layer_types": ["full_attention" if each else "sliding_attention" for each in whole],
            "sliding_window": None if all(whole) else window,
            "layer_rotary": ["main" if each else "local" for each in whole],
            "rope_local_theta": self._real("rope.freq_base_swa", 10000.0),
        }

    def _model_type(self, window: int | None) -> str:
        if self._architecture == GEMMA:
            return NATIVE
        if self._architecture in PAIRED:
            return "mixtral" if self._number("expert_count", 0) else "mistral" if window else "llama"
        if window:
            raise InputError(f"{self.path}: a sliding window for {self._architecture} is not supported")
        return {theirs: ours for ours, theirs in EXPERTS.items()}.get(self._architecture, self._architecture)

    def _experts(self, width: int) -> dict[str, Any] | None:
        """The fields of `MoEConfig`; None for a network without experts. How scores become weights is not in the file
        but in llama.cpp: they are divided by the sum of those chosen, but for Qwen2."""
        qwen = self._architecture in ("qwen2moe", "qwen3moe")
        if not qwen and not self._number("expert_count", 0):
            return None
        if (scores := self._number("expert_gating_func", _SOFTMAX)) != _SOFTMAX:
            raise InputError(f"{self.path}: experts are chosen by function {scores}; only softmax (1) is supported")
        values = {
            "num_experts": self._number("expert_count"),
            "num_experts_per_tok": self._number("expert_used_count"),
            "moe_intermediate_size": self._number("expert_feed_forward_length", None if qwen else width),
            "norm_topk_prob": self._architecture != "qwen2moe",
        }
        if self._architecture == "qwen2moe":
            size = self._number("expert_shared_feed_forward_length")
            values |= {"shared_expert_intermediate_size": size, "shared_expert_gate": True}
        return values

    def _widths(self, layers: int) -> list[int]:
        """Inner width of the MLP of each layer."""
        check_layers(layers, str(self.path))
        value = self._field("feed_forward_length")
        widths = value if isinstance(value, list) else [value] * layers
        if len(widths) != layers or not widths or not all(isinstance(width, int) for width in widths):
            raise InputError(f"{self.path}: feed_forward_length must be a whole number a layer (got {value!r})")
        return widths

    def _eps(self) -> float:
        # 1e-5 is stored as float32; its shortest decimal is what config.json said
        eps = np.float32(self._real("attention.layer_norm_rms_epsilon"))
        return float(str(eps))

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise InputError(f"{self.path} has no token_embd.weight; it is not a complete language model")
        return int(embedding.shape[1])  # GGUF lists the fastest dimension first

    def _stops(self) -> tuple[int, ...]:
        """What the file names, and tokens that llama.cpp knows by their text: files of Gemma 3, and early ones of Llama
        3, name the end of a text alone and not that of a turn."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = [self.fields.get(f"tokenizer.ggml.{key}") for key in keys]
        tokens = self.fields.get("tokenizer.ggml.tokens")
        ids += [
            number for number, token in enumerate(tokens if isinstance(tokens, list) else ()) if token in END_OF_TURN
        ]
        return tuple(dict.fromkeys(stop for stop in ids if stop is not None))

    def _match_names(self) -> dict[str, str]:
        shapes = tensor_shapes(self.config)
        rotary = (
            ROPE_FACTORS,
            *((LONG_FACTORS, SHORT_FACTORS) if self.config.rope_scaling.rope_type == "longrope" else ()),
        )
        known = {model_name_of(name): name for name in self._tensors if name not in rotary}
        places = {expert_of(name)[0] for name in shapes}
        if unknown := [name for hf_name, name in known.items() if hf_name not in places]:
            raise InputError(f"{self.path}: tensor {unknown[0]!r} has no place in a {self._architecture} model")
        found: dict[str, str] = {}
        for name, shape in shapes.items():
            place, expert = expert_of(name)
            if place not in known:
                raise InputError(f"{self.path} lacks {name}; the file is not complete: get it again")
            stored = tuple(int(size) for size in reversed(self._tensors[known[place]].shape))
            if expert is not None:
                assert self.config.moe is not None
                shape = (self.config.moe.num_experts, *shape)
            if name.endswith(".shared_expert_gate.weight"):
                shape = shape[1:]
            if stored != shape:
                raise InputError(f"{self.path}: {known[place]} has the shape {stored}, its metadata says {shape}")
            found[name] = known[place]
        return found


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


def _check_architecture(path: Path, fields: dict[str, Any]) -> str:
    architecture = fields.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise InputError(
            f"{path} has the architecture {architecture!r}, which is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return architecture
