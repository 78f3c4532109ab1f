"""A decoder that is changed and judged again and again: channels of MLPs leave, whole layers leave, weights get 4 bits,
layers see fewer tokens back.

What is judged is a decoder whose transforms are those of the base's quantize step (rotation, smoothing), so that 4 bits
are rounded as they will be. 8 bits are taken to cost nothing: every combination has at least them, and what they cost
is a small part of what is chosen among here. Half of the calibration windows show which channels are active and how
inputs are distributed, the other half judges: the divergence of the answers from those of the whole network in floating
point, in nats, over every fourth token. (Where `bits` is [4] alone, from those of the whole network in 4 bits.)

Layers run one after the other from the first that is changed; what enters it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penjing.compress.decoder.artifact import make_weights
from penjing.compress.decoder.cases import LayerCases
from penjing.compress.decoder.layer import Activations
from penjing.compress.decoder.parts import same_input
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.decoder.weights import fake_quantize_activation
from penjing.compress.families.base import Family
from penjing.compress.measure.perplexity import LARGEST_LOSS
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune.ranking import select, short_name
from penjing.compress.recipe import Recipe
from penjing.compress.samples.data import TokenData
from penjing.compress.search.base import only_step
from penjing.compress.search.decoder_clock import DecoderClock
from penjing.compress.search.points import decoder_steps
from penjing.compress.search.recipe import GONE, PACKED, STORED, WHOLE, Choices, Workload
from penjing.compress.search.space import Counted, OfLayer, Space, Variable
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.prune_scores import unit_scores
from penjing.compress.steps.quantize import Quantize
from penjing.compress.steps.window import Window
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.attention import causal_attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import with_windows
from penjing.core.progress import Progress
from penjing.core.work import Tasks

STRIDE = 4  # tokens of which one is judged: logits are most of the work of a small decoder otherwise
ROWS = 128  # of logits at a time


class DecoderTrials:
    """The decoder of a recipe's model, and every change of it that a space allows.

    Attributes:
        decides: all that a divergence depends on beside the checkpoint, JSON-ready.

    Raises:
        ConfigError: the recipe lacks the step that a choice belongs to, has what cannot be searched, or a choice
            changes nothing.
        InputError: the checkpoint is damaged, or holds experts.
    """

    unit = "nats"

    def __init__(self, recipe: Recipe, choices: Choices, family: Family, progress: Progress) -> None:
        self.recipe, self.family = recipe, family
        self.folder, self.choices = recipe.model, choices
        self.config: DecoderConfig = open_checkpoint(recipe.model).config
        prune, quantize = only_step(recipe, Prune), only_step(recipe, Quantize)
        samples = family.samples(recipe.model, recipe.data, progress)
        assert isinstance(samples, TokenData)
        self.seen, self.judged_WT = _halves(samples.windows)
        self.settings = self._settings(quantize, choices)
        layers = [
            Variable(f"model.layers.{index}", "layer", options, None, units)
            for index, (options, units) in enumerate(self._units(recipe, prune, choices, family, progress))
            if len(options) > 1
        ]
        bits = [
            Variable(f"model.layers.{index}", "bits", tuple(map(float, choices.bits)))
            for index in range(self.config.num_hidden_layers)
            if len(choices.bits) > 1
        ]
        attention = self._attention(recipe, choices.windows)
        variables = (*layers, *bits, *attention)
        places = {(each.name, each.kind): place for place, each in enumerate(variables)}
        self.of_layer = [
            OfLayer(*(places.get((f"model.layers.{index}", kind)) for kind in ("layer", "bits", "attention")))
            for index in range(self.config.num_hidden_layers)
        ]
        count = self.config.num_hidden_layers
        self.sees = {each: causal_attention(with_windows(self.config, [each] * count)) for each in choices.windows}
        self.space = Space(variables, self._counted(variables), _beside(self.of_layer))
        self.decides = {
            "data": recipe.data.model_dump(mode="json"),
            "units": [(each.name, each.options, each.units) for each in layers],
            "bits": [(each.name, each.options) for each in bits],
            "attention": [(each.name, each.options) for each in attention],
            "quantize": self.settings.model_dump(mode="json"),
            "stride": STRIDE,
        }
        self._layers: list[LayerCases] = []

    @property
    def count(self) -> int:
        """How many tokens are judged."""
        return len(self.judged_WT) * len(range(0, self.judged_WT.shape[1], STRIDE))

    def clock(self, workload: Workload) -> DecoderClock:
        """What the engine takes for each combination."""
        return DecoderClock(self.config, self.settings, self.space, self.of_layer, self.choices.bits[0], workload)

    def point(self, base: dict[str, Any], choice: Sequence[int]) -> list[dict[str, Any]]:
        """See `Changes`."""
        return decoder_steps(base, self.space, choice, self.choices.bits[0], self.config.num_hidden_layers)

    @torch.no_grad()
    def prepare(self, tasks: Tasks, progress: Progress) -> None:
        """Transform the network, round it to 4 bits layer by layer, and run it once; `tasks` keeps what is costly."""
        folder = self._transformed(tasks, progress)
        self._stream = stream = LayerStream(open_checkpoint(folder))
        rounds = PACKED in self.choices.bits
        seen_WTE, hidden_WTE = stream.embed(self.seen), stream.embed(self.judged_WT)
        self._entering: list[Tensor] = []
        progress.start("running the network as it is", self.config.num_hidden_layers)
        for index in range(self.config.num_hidden_layers):
            weights = stream.weights(index)
            module = stream.float_layer(index, weights)
            layer = LayerCases(module, self._staying(index))
            if rounds:
                active = Activations(num_windows=len(self.seen))
                stream.run(module, seen_WTE, active.observe)
                layer.round(self.settings, same_input(weights), active.samples())
            self._layers.append(layer)
            self._entering.append(hidden_WTE.clone())
            self._run(index, self.space.start, hidden_WTE)
            progress.advance()
        self._head = stream.stored_head()
        self._answers = [each.log_softmax(-1) for each in self._logits(hidden_WTE)]

    @torch.no_grad()
    def divergence(self, choice: Sequence[int]) -> float:
        """How far the answers of a combination are from those of the network as it is; at most `LARGEST_LOSS`."""
        changed = [
            index for index, each in enumerate(self.of_layer) if any(choice[variable] for variable in each.scope)
        ]
        if not changed:
            return 0.0
        return self._from_whole(self._logits(self._through(choice, changed[0])))

    def healed(self, folder: Path, choice: Sequence[int], tasks: Tasks, progress: Progress) -> float:
        """See `Changes`. The layers that stay are rounded anew, from what enters them in `folder`."""
        quantize = tuple(step for step in self.recipe.steps if isinstance(step, Quantize))
        recipe = self.recipe.model_copy(update={"model": folder, "steps": quantize})
        made = DecoderTrials(recipe, Choices(widths=(WHOLE,), bits=self.choices.bits), self.family, progress)
        made.prepare(tasks, progress)
        own = [
            choice[of.bits]
            for of in self.of_layer
            if of.bits is not None
            and (of.width is None or self.space.variables[of.width].options[choice[of.width]] != GONE)
        ]
        return self._from_whole(made.logits(own))

    @torch.no_grad()
    def logits(self, choice: Sequence[int]) -> Sequence[Tensor]:
        """(≤ ROWS, V) at a time, of the judged tokens of a combination."""
        return self._logits(self._through(choice, 0))

    def _through(self, choice: Sequence[int], first: int) -> Tensor:
        hidden_WTE = self._entering[first].clone()
        for index in range(first, len(self._layers)):
            self._run(index, choice, hidden_WTE)
        return hidden_WTE

    def _from_whole(self, found: Sequence[Tensor]) -> float:
        total, rows = 0.0, 0
        for before_RV, logits_RV in zip(self._answers, found, strict=True):
            after_RV = logits_RV.log_softmax(-1)
            total += float((before_RV.exp() * (before_RV - after_RV)).sum(dtype=torch.float64))
            rows += len(after_RV)
        mean = total / rows
        return min(max(mean, 0.0), LARGEST_LOSS) if np.isfinite(mean) else LARGEST_LOSS

    def _run(self, index: int, choice: Sequence[int], hidden_WTE: Tensor) -> None:
        """Send hidden states through a layer as a combination has it, in place."""
        width, bits, attention = self.of_layer[index]
        option = 0 if width is None else choice[width]
        if width is not None and self.space.variables[width].options[option] == GONE:
            return
        stored = self.choices.bits[0] if bits is None else self.space.variables[bits].options[choice[bits]]
        packed = stored == PACKED
        layer = self._layers[index]
        layer.take(option, packed=packed)
        group = self.settings.group if self.settings.offsets else 0
        rounded: Callable[[str, Tensor], Tensor] = lambda _, x: fake_quantize_activation(x, group)  # noqa: E731
        attend = None
        if attention is not None and choice[attention]:
            attend = self.sees[int(self.space.variables[attention].options[choice[attention]])]
        self._stream.run(layer.module, hidden_WTE, rounded if packed else None, attend=attend)

    def _logits(self, hidden_WTE: Tensor) -> Sequence[Tensor]:
        """(≤ ROWS, V) at a time, of every fourth token."""
        hidden_RE = self._stream.final_norm(hidden_WTE[:, ::STRIDE].flatten(0, 1))
        return [self._head(rows_RE) for rows_RE in hidden_RE.split(ROWS)]

    def _staying(self, index: int) -> list[Tensor | None]:
        width = self.of_layer[index].width
        if width is None:
            return [None]
        variable, inner = self.space.variables[width], self.config.ffn_size(index)
        found: list[Tensor | None] = []
        for share, units in zip(variable.options, variable.units, strict=True):
            left = sorted({*range(inner)} - {*units}) if share != GONE else []
            found.append(None if share == WHOLE else torch.tensor(left, dtype=torch.int64))
        return found

    def _transformed(self, tasks: Tasks, progress: Progress) -> Path:
        """The checkpoint with the transforms of the quantize step, which is the model itself where it has none."""
        transform = self.settings.transform
        if not (transform.rotate or transform.smooth_norm or transform.smooth_down or transform.smooth_output):
            return self.folder
        if PACKED not in self.choices.bits:
            return self.folder  # what is floating is the same before and after
        floats = Int8Settings(
            transform=transform, lm_head="keep", embedding_dtype="float32", keep=("*",), rounding="nearest"
        )
        return make_weights(self.folder, floats, self.seen, tasks, progress)[0]

    def _settings(self, step: Quantize | None, choices: Choices) -> Int8Settings:
        if not {*choices.bits} <= {STORED, PACKED}:
            raise ConfigError(
                f"space.bits={list(choices.bits)}: layers of a decoder have 8 bits or 4; write [8, 4], [8] or [4]"
            )
        if step is None:
            if PACKED in choices.bits:
                raise ConfigError(
                    "space.bits needs a step of kind 'quantize' in base, whose rules of 4 bits are taken; add one, or "
                    "set space.bits=[8]"
                )
            return Int8Settings()
        fields = set(Int8Settings.model_fields)
        given = {name: value for name, value in step.model_dump().items() if name in fields}
        settings = Int8Settings.model_validate(given | {"effective_bits": None, "budget_mb": None, "sensitivity": None})
        if PACKED in choices.bits and settings.weights_bits != PACKED:
            raise ConfigError(
                "space.bits names 4, and the quantize step of base stores 8: set steps.N.weights_bits=4 with its group "
                "by [settings], or take space.bits=[8]"
            )
        if settings.scales == "whole":
            raise ConfigError('a search times groups with float scales: set steps.N.scales="float" by [settings]')
        if settings.transform.hadamard_down:
            raise ConfigError("a search cannot cut what hadamard_down mixes; set steps.N.transform.hadamard_down=0")
        if settings.keep or settings.keep_int8:
            raise ConfigError(
                "a search says itself which layers of a decoder have which bits; set steps.N.keep=[] and keep_int8=[]"
            )
        return settings

    def _units(
        self, recipe: Recipe, step: Prune | None, choices: Choices, family: Family, progress: Progress
    ) -> list[tuple[tuple[float, ...], tuple[tuple[int, ...], ...]]]:
        """Of each layer the shares of its MLP that may stay, and the channels that leave at each."""
        count = self.config.num_hidden_layers
        subject = family.need("pruner", "pruned").open(recipe.model, ("ffn",), (), progress)  # refuses experts
        if any(self.config.layer_type(index) == "lsh_attention" for index in range(count)):
            raise InputError(f"{self.folder} has lsh_attention, which a search cannot judge layer by layer")
        if self.config.conv_taps:
            raise InputError(f"{self.folder} has short convolutions, whose time a search does not know")
        found: list[tuple[list[float], list[tuple[int, ...]]]] = [([WHOLE], [()]) for _ in range(count)]
        narrower = choices.widths != (WHOLE,)
        if (narrower or choices.layers) and step is None:
            raise ConfigError(
                "space.widths and space.layers need a step of kind 'prune' in base, whose method and round_to are "
                "taken; add one, or set space.widths=[1.0] and space.layers=false"
            )
        if narrower:
            assert step is not None
            progress.start("analysing the network", 1)
            groups = dependency_graph(subject.model, subject.example, protect=step.protect).groups
            groups = subject.parts(groups)["ffn"]
            obs = family.need("pruner", "pruned").obs
            data = TokenData(self.seen, 1)
            scores = unit_scores(subject, groups, step.method, step.seed, data, obs, progress)
            progress.advance()
            for group, values in zip(groups, scores, strict=True):
                options, units = found[int(short_name(group).split(".")[2])]
                for share in choices.widths[1:]:
                    chosen = select([group], [values], round(WHOLE - share, 9), round_to=step.round_to)
                    if chosen and len(chosen[0][1]) > len(units[-1]):
                        options.append(share)
                        units.append(tuple(chosen[0][1]))
                        self._check_width(len(group) - len(units[-1]))
        if choices.layers:
            for options, units in found[1:]:  # the first stays, so that one does
                options.append(GONE)
                units.append(())
        return [(tuple(options), tuple(units)) for options, units in found]

    def _attention(self, recipe: Recipe, windows: Sequence[int]) -> list[Variable]:
        """Of each layer that sees more than the smallest window what it may see, falling from what it sees."""
        if not windows:
            return []
        if any(isinstance(step, Window) for step in recipe.steps):
            raise ConfigError("base has a step of kind 'window', which space.windows varies: leave it out of base")
        if windows[0] >= self.judged_WT.shape[1]:
            raise ConfigError(
                f"space.windows={list(windows)}: texts of {self.judged_WT.shape[1]} tokens show nothing of a window of "
                f'{windows[0]}; give longer ones by "data.window" in [settings], or smaller windows'
            )
        found = []
        for index in range(self.config.num_hidden_layers):
            sees = self.config.layer_window(index) or self.config.max_position_embeddings
            options = [sees, *(each for each in windows if each < sees)]
            if len(options) > 1:
                found.append(Variable(f"model.layers.{index}", "attention", tuple(map(float, options))))
        return found

    def _check_width(self, inner: int) -> None:
        if PACKED in self.choices.bits and inner % self.settings.group:
            raise ConfigError(
                f"an MLP of {inner} channels cannot have groups of {self.settings.group} inputs in 4 bits; set "
                f"steps.N.round_to={self.settings.group} of the prune step by [settings]"
            )

    def _counted(self, variables: tuple[Variable, ...]) -> tuple[Counted, ...]:
        """Of each layer multiply-accumulates of a token (an INT8 one counts a quarter) and bytes; of the head too."""
        config, found = self.config, list[Counted]()
        hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        attention = hidden * (2 * (queries + config.num_key_value_heads * config.head_dim) + config.gate_size)
        extra = (2 if self.settings.offsets else 1) * 2 / self.settings.group  # bytes of a weight's scale and offset
        for index, (width, bits, _) in enumerate(self.of_layer):
            scope = tuple(sorted(each for each in (width, bits) if each is not None))
            sizes = [len(variables[each].options) for each in scope]
            macs, stored = np.zeros(sizes), np.zeros(sizes)
            for case in np.ndindex(*sizes):
                at = dict(zip(scope, case, strict=True))
                share, units = WHOLE, tuple[int, ...]()
                if width is not None:
                    share, units = variables[width].options[at[width]], variables[width].units[at[width]]
                if share == GONE:
                    continue
                weights = attention + (2 + config.mlp_gated) * hidden * (config.ffn_size(index) - len(units))
                of = self.choices.bits[0] if bits is None else variables[bits].options[at[bits]]
                macs[case] = weights / 4  # 4-bit weights are multiplied as 8-bit ones
                stored[case] = weights * (1.0 if of == STORED else 0.5 + extra)
            found.append(Counted(scope, {"macs": macs, "bytes": stored}))
        head = float(hidden * config.vocab_size)
        found.append(Counted((), {"macs": np.array(head / 4), "bytes": np.array(head)}))
        return tuple(found)


def _halves(windows_WT: Tensor) -> tuple[Tensor, Tensor]:
    """What is looked at, and what is judged.

    Raises:
        InputError: there is a single window.
    """
    if len(windows_WT) < 2:
        raise InputError("a search needs two windows of calibration text or more; raise data.tokens")
    return windows_WT[::2], windows_WT[1::2]


def _beside(of_layer: list[OfLayer]) -> tuple[tuple[int, int], ...]:
    """Variables of layers that follow each other, and those of one layer."""
    pairs = [(one.width, two.width) for one, two in pairwise(of_layer)]
    pairs += [(one.attention, two.attention) for one, two in pairwise(of_layer)]
    pairs += [(each.width, each.attention) for each in of_layer]
    return tuple((one, two) for one, two in pairs if one is not None and two is not None)
