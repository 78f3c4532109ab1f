"""Seconds of a decoder's step in penjing's own engine: of its linear layers one by one, of attention by the keys that
it reads, and of whole steps.

Only shapes and bits matter for time, so that weights are made up. Layers are timed in the order in which a network
runs them, one copy for each layer of the network: what is read again was pushed out of the caches by the others, as
far as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.search.latency import LAYERS, Choice, TimedLayer, clock_of
from penjing.compress.search.recipe import GONE, PACKED, Workload
from penjing.compress.search.space import OfLayer, Space
from penjing.core.errors import ConfigError, SetupError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import inverse_frequencies
from penjing.core.progress import Progress
from penjing.kernels.cpu.kv_layout import narrow_dtype
from penjing.kernels.cpu.packing import Panels
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.int4_linear import PackedInt4, prepack_int4
from penjing.kernels.int8_linear import PackedInt8, prepack_int8
from penjing.kernels.step_layers import LayerWeights

K = TypeVar("K")
LAYER = "a_layer"  # what is around the products of a layer that stays
ATTENTION = "of_attention"
BLOCK = 16  # tokens of a block of the key-value cache, as the engine's default


@dataclass(frozen=True)
class Shape:
    """Of one decoder layer: `inner` features of its MLP, weights of `bits`, a sliding `window`, None: none."""

    inner: int
    bits: int
    window: int | None


class DecoderClock:
    """See `Clock`.

    Args:
        variables: of each layer in `space`.
        whole_bits: of layers without such a variable.

    Raises:
        ConfigError: the workload is longer than the model's context, or too short for a window to matter.
        SetupError: the C++ extension is not built or switched off.
    """

    def __init__(
        self,
        config: DecoderConfig,
        settings: Int8Settings,
        space: Space,
        variables: Sequence[OfLayer],
        whole_bits: int,
        workload: Workload,
    ) -> None:
        extension = cpu_extension()
        if extension is None:
            raise SetupError(
                "latency is that of penjing's C++ kernels, which are not built or switched off; build them ('make "
                "install'), or set cost=macs"
            )
        if workload.context >= config.max_position_embeddings:
            raise ConfigError(
                f"workload.context={workload.context}: the model's context is {config.max_position_embeddings} tokens; "
                "give fewer"
            )
        windows = [option for each in space.variables if each.kind == "attention" for option in each.options[1:]]
        if windows and max(windows) > workload.context:
            raise ConfigError(
                f"workload.context={workload.context}: a window of {max(windows):g} tokens saves nothing there; raise "
                "it, or give smaller space.windows"
            )
        self.config, self.settings, self.space, self.workload = config, settings, space, workload
        self.extension, self.variables, self.whole_bits = extension, variables, whole_bits
        self.groups = GROUPS if config.mlp_gated else GROUPS | {"gate_up": ("gate",)}
        if config.attention_gate is not None:
            self.groups = self.groups | {"qkv": (*GROUPS["qkv"], "head_gate")}
        self._whole: Callable[[], object] | None = None
        self._weights: dict[tuple[int, int, int], PackedInt8 | PackedInt4] = {}

    def shape(self, layer: int, choice: Choice) -> Shape | None:
        """What is left of a layer; None where it leaves."""
        width, bits, attention = self.variables[layer]
        share = 1.0 if width is None else self.space.variables[width].options[choice[width]]
        if share == GONE:
            return None
        units = () if width is None else self.space.variables[width].units[choice[width]]
        stored = self.whole_bits if bits is None else self.space.variables[bits].options[choice[bits]]
        window = self.config.layer_window(layer)
        if attention is not None and choice[attention]:
            window = int(self.space.variables[attention].options[choice[attention]])
        return Shape(self.config.ffn_size(layer) - len(units), int(stored), window)

    @property
    def now(self) -> Callable[[], float]:
        """See `Clock`."""
        return clock_of(self.extension.num_threads)

    def parts(self, rounds: int, progress: Progress) -> tuple[list[TimedLayer], dict[str, Any]]:
        """See `Clock`; the embedding costs nothing, and the LM head is part of what a step costs once."""
        cases: list[dict[tuple[int, ...], Shape | None]] = []
        for layer, of in enumerate(self.variables):
            sizes = [len(self.space.variables[each].options) for each in of.scope]
            cases.append({case: self.shape(layer, self._with(of.scope, case)) for case in np.ndindex(*sizes)})
        found = [shape for of in cases for shape in of.values() if shape is not None]
        linear = self._linear([*dict.fromkeys((shape.inner, shape.bits) for shape in found)], rounds, progress)
        attention = self._attention([*dict.fromkeys(self._keys(shape) for shape in found)], rounds, progress)
        parts = []
        for variables, of in zip(self.variables, cases, strict=True):
            sizes = [len(self.space.variables[each].options) for each in variables.scope]
            kinds = {name: np.zeros(sizes) for name in (LAYERS, ATTENTION, LAYER)}
            for case, shape in of.items():
                if shape is not None:
                    kinds[LAYERS][case] = sum(linear[shape.inner, shape.bits].values())
                    kinds[ATTENTION][case], kinds[LAYER][case] = attention[self._keys(shape)], 1.0
            parts.append(TimedLayer(variables.scope, kinds))
        entries = [
            {"layer": name, "inner": inner, "bits": bits, "keys": None, "seconds": value}
            for (inner, bits), of in linear.items()
            for name, value in of.items()
        ]
        entries += [
            {"layer": "attention", "inner": None, "bits": None, "keys": keys, "seconds": value}
            for keys, value in attention.items()
        ]
        return parts, {"entries": entries, "isa": self.extension.isa, "threads": self.extension.num_threads}

    @property
    def whole(self) -> Callable[[], object]:
        """See `Clock`."""
        if self._whole is None:
            self._whole = self.network(self.space.start)
        return self._whole

    def network(self, choice: Choice) -> Callable[[], object]:
        """See `Clock`: one step, each stream's next token."""
        shapes = {layer: self.shape(layer, choice) for layer in range(self.config.num_hidden_layers)}
        step = self._step({layer: shape for layer, shape in shapes.items() if shape is not None})
        streams, context = self.workload.streams, self.workload.context
        table_SB, pool = self._cache(step.num_layers)
        inputs = (
            torch.arange(streams, dtype=torch.int32) % self.config.vocab_size,
            torch.full((streams,), context, dtype=torch.int32),
            table_SB[:, -1].long() * BLOCK + context % BLOCK,
            torch.arange(streams + 1, dtype=torch.int32),
            torch.full((streams,), context + 1, dtype=torch.int32),
            table_SB,
            torch.arange(streams, dtype=torch.int32),
            pool,
        )
        return lambda: step.step_top(1, *inputs)

    def _with(self, scope: tuple[int, ...], case: tuple[int, ...]) -> Choice:
        choice = list(self.space.start)
        for variable, option in zip(scope, case, strict=True):
            choice[variable] = option
        return tuple(choice)

    def _keys(self, shape: Shape) -> int:
        """That a stream's next token reads."""
        return min(self.workload.context + 1, shape.window or self.workload.context + 1)

    def _cache(self, layers: int) -> tuple[Tensor, Tensor]:
        """Blocks of each stream (S, B) and a pool of keys and values (layers, 2, blocks, KV, BLOCK, D)."""
        streams, blocks = self.workload.streams, -(-(self.workload.context + 1) // BLOCK)
        table_SB = torch.arange(1, 1 + streams * blocks, dtype=torch.int32).view(streams, blocks).contiguous()
        heads, size = self.config.num_key_value_heads, self.config.head_dim
        dtype = narrow_dtype(self.extension.isa, size)  # as the engine keeps keys and values of quantized weights
        return table_SB, torch.zeros(layers, 2, 1 + streams * blocks, heads, BLOCK, size, dtype=dtype)

    def _linear(
        self, shapes: list[tuple[int, int]], rounds: int, progress: Progress
    ) -> dict[tuple[int, int], dict[str, float]]:
        """Median seconds of each layer of one input alone, by features of the MLP and bits."""
        packed = {
            (shape, name): [self._panels(name, *shape) for _ in range(self.config.num_hidden_layers)]
            for shape in shapes
            for name in self.groups
        }
        rows = {
            each: torch.randn(self.workload.streams, panels[0].in_features, generator=_generator())
            for each, panels in packed.items()
        }
        calls = {
            each: [partial(self.extension.int8_linear, rows[each], own) for own in panels]  # of 4 bits as well
            for each, panels in packed.items()
        }
        found = self._timed(calls, rounds, progress)
        return {shape: {name: found[shape, name] for name in self.groups} for shape in shapes}

    def _attention(self, keys: list[int], rounds: int, progress: Progress) -> dict[int, float]:
        """Median seconds of one layer's attention alone, by the keys that a token reads."""
        streams, config = self.workload.streams, self.config
        table_SB, pool = self._cache(config.num_hidden_layers)
        q_THD = torch.randn(streams, config.num_attention_heads, config.head_dim, generator=_generator())
        own = (
            torch.arange(streams + 1, dtype=torch.int32),
            torch.full((streams,), self.workload.context + 1, dtype=torch.int32),
            table_SB,
            config.head_dim**-0.5,
        )
        calls = {
            each: [partial(self.extension.paged_attention, q_THD, *layer, *own, each, turned=True) for layer in pool]
            for each in keys
        }
        return self._timed(calls, rounds, progress)

    def _timed(
        self, calls: Mapping[K, Sequence[Callable[[], object]]], rounds: int, progress: Progress
    ) -> dict[K, float]:
        """Median seconds of calls, the copies of each taking turns with all others."""
        found: dict[K, list[float]] = {each: [] for each in calls}
        progress.start("timing layers", rounds)
        for _ in range(rounds):
            for copies in zip(*calls.values(), strict=True):
                for each, call in zip(calls, copies, strict=True):
                    began = self.now()
                    call()
                    found[each].append(self.now() - began)
            progress.advance()
        return {each: median(times) for each, times in found.items()}

    def _panels(self, name: str, inner: int, bits: int) -> Panels:
        made = [self._made(*self._size(each, inner), bits) for each in self.groups[name]]
        swiglu = self.groups[name] == ("gate", "up")
        fours = [each.part for each in made if isinstance(each, PackedInt4)]
        if fours:
            return self.extension.prepack_int4(fours, self.settings.group, swiglu=swiglu)
        eights = [(each.weight_NK, each.scale_N, each.bias_N) for each in made if isinstance(each, PackedInt8)]
        return self.extension.prepack_parts(eights, swiglu=swiglu)

    def _step(self, shapes: dict[int, Shape]) -> DecoderStep:
        config, ones = self.config, torch.ones
        layers = []
        for shape in shapes.values():
            made: dict[str, Any] = {
                each: self._made(*self._size(each, shape.inner), shape.bits)
                for group in self.groups.values()
                for each in group
            }
            if not config.mlp_gated:
                made |= {"up": None, "activation": config.activation}
            if config.qk_norm:
                made |= {"q_norm": ones(config.head_dim), "k_norm": ones(config.head_dim)}
            made |= {"input_norm": ones(config.hidden_size), "post_norm": ones(config.hidden_size)}
            layers.append(LayerWeights(**made, window=shape.window))
        return DecoderStep(
            self.extension,
            layers,
            torch.zeros(config.vocab_size, config.hidden_size, dtype=torch.float16),
            ones(config.hidden_size),
            self._made(config.vocab_size, config.hidden_size, 8),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            inverse_frequency_F=inverse_frequencies(config),
            max_positions=config.max_position_embeddings,
        )

    def _size(self, linear: str, inner: int) -> tuple[int, int]:
        """Outputs and inputs."""
        config = self.config
        hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        return {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "head_gate": (config.gate_size, hidden),
            "out": (hidden, queries),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }[linear]

    def _made(self, rows: int, columns: int, bits: int) -> PackedInt8 | PackedInt4:
        """A made-up weight, not yet packed; one for each shape."""
        made = self._weights.get((rows, columns, bits))
        if made is None:
            made = self._weights[rows, columns, bits] = self._drawn(rows, columns, bits)
        return made

    def _drawn(self, rows: int, columns: int, bits: int) -> PackedInt8 | PackedInt4:
        if bits != PACKED:
            weight_NK = torch.randint(-127, 128, (rows, columns), generator=_generator(), dtype=torch.int8)
            return prepack_int8(weight_NK, torch.full((rows,), 1e-4))
        words_NK8 = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), generator=_generator(), dtype=torch.int32)
        offsets = self.settings.offsets
        scale_NG = torch.full(
            (rows, columns // self.settings.group), 1e-3, dtype=torch.float16 if offsets else torch.bfloat16
        )
        return prepack_int4(words_NK8, scale_NG, None, torch.full_like(scale_NG, -8e-3) if offsets else None)


GROUPS = {"qkv": ("q", "k", "v"), "out": ("out",), "gate_up": ("gate", "up"), "down": ("down",)}
"""Layers of one input, which the engine packs as one."""


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
