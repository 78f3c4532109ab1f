"""Mixed precision: which module computes in which format at which step, applied to a model from outside.

Parameters, gradients and optimiser state stay float32 (the master weights); what changes is the format of the
computation, by `torch.autocast` regions around modules. A mode gives the format of the whole model; a policy is an
ordered list of rules, each for a group or a name pattern and everything below it, the later one winning; a schedule
changes the mode over the run.

mode      computes in
auto      bf16 where the devices of all processes have instructions for it, else fp32
fp32      IEEE float32
tf32      TensorFloat-32 matrix products (NVIDIA Ampere or newer)
bf16      bfloat16 matrix products and convolutions
fp16      float16 matrix products and convolutions, with dynamic loss scaling
hybrid    bf16, but embeddings, norms, softmax, routers of experts and the output head in float32
The loss is computed in float32 always, evaluation in float32 altogether.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import nn
from torch.overrides import TorchFunctionMode

from penjing.core.config import Config
from penjing.core.errors import ConfigError
from penjing.train.numerics.fp8 import fp8_linear

Mode = Literal["auto", "fp32", "tf32", "bf16", "fp16", "hybrid"]
Format = Literal["fp32", "bf16", "fp16", "fp8"]
MODES: tuple[Mode, ...] = ("auto", "fp32", "tf32", "bf16", "fp16", "hybrid")
GROUPS = ("embeddings", "norms", "softmax", "attention", "linears", "convolutions", "head")
_BASE: dict[str, Format] = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "hybrid": "bf16"}
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
# Of modules whose parameters are read by a product that autocast casts for, and nowhere else; `is_product` tells more.
_PRODUCTS = frozenset({nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward})

Gather = Callable[[nn.Module, Mapping[nn.Module, torch.dtype]], None]  # (a model, its modules that read 16 bits alone)


class Rule(Config):
    """A format for some modules and everything below them."""

    match: str = Field(
        min_length=1,
        description="A group (embeddings, norms, softmax, attention, linears, convolutions, head) or a pattern of "
        "names of modules.",
    )
    compute: Format = Field(description="The number format that these modules compute in.")


class Phase(Config):
    """A mode for the first part of a run."""

    until: float = Field(gt=0, lt=1, description="The share of the run's steps at which the phase ends.")
    mode: Mode = Field(description="The mode of the steps before that.")


_HYBRID = tuple(Rule(match=group, compute="fp32") for group in ("embeddings", "norms", "softmax", "*.mlp.gate", "head"))


class PrecisionConfig(Config):
    """The recipe's [precision]; see the module for modes."""

    mode: Mode = Field(
        default="fp32",
        description='The format of the whole model; "auto" is bf16 where the device computes it, else fp32.',
    )
    policy: tuple[Rule, ...] = Field(default=(), description="Other formats for some modules; the later rule wins.")
    schedule: tuple[Phase, ...] = Field(default=(), description="Other modes at the beginning of the run.")
    loss_scale: float | None = Field(
        default=None, gt=0, description="The first loss scale of fp16; by default it follows from the parameter count."
    )
    loss_scale_window: int = Field(
        default=2000, gt=0, description="Steps without overflow after which the loss scale doubles."
    )

    @model_validator(mode="after")
    def _in_order(self) -> PrecisionConfig:
        ends = [phase.until for phase in self.schedule]
        if any(later <= earlier for earlier, later in pairwise(ends)):
            raise ValueError(f"schedule ends at {ends}; each phase must end after the one before it")
        return self

    def widens_softmax(self) -> bool:
        """Whether softmax has a format of its own in any update."""
        modes = {self.mode, *(phase.mode for phase in self.schedule)}
        return "hybrid" in modes or any(rule.match == "softmax" for rule in self.policy)

    def mode_at(self, step: int, steps: int) -> Mode:
        """The mode of update `step` of `steps`."""
        for phase in self.schedule:
            if step < phase.until * steps:
                return phase.mode
        return self.mode

    @property
    def modes(self) -> set[Mode]:
        """Every mode that the run uses."""
        return {self.mode, *(phase.mode for phase in self.schedule)}


def apply_environment(config: PrecisionConfig, environment: Mapping[str, str] = os.environ) -> PrecisionConfig:
    """`config` as changed by the environment.

    PENJING_AMP_ENABLED (0: fp32; 1: bf16 where the recipe says fp32), PENJING_PRECISION_MODE (replaces mode and
    schedule), PENJING_LOSS_SCALE_WINDOW (steps), PENJING_FP32_OPS (groups or patterns, separated by commas, computed
    in float32).

    Raises:
        ConfigError: names the variable and what it may hold.
    """
    changes: dict[str, Any] = {}
    if mode := environment.get("PENJING_PRECISION_MODE"):
        if mode not in MODES:
            raise ConfigError(f"PENJING_PRECISION_MODE={mode}: choose one of {', '.join(MODES)}")
        changes |= {"mode": mode, "schedule": ()}
    if enabled := environment.get("PENJING_AMP_ENABLED"):
        if enabled not in ("0", "1"):
            raise ConfigError(f"PENJING_AMP_ENABLED={enabled}: write 0 or 1")
        if enabled == "0":
            changes |= {"mode": "fp32", "schedule": (), "policy": ()}
        elif changes.get("mode", config.mode) == "fp32":
            changes["mode"] = "bf16"
    if window := environment.get("PENJING_LOSS_SCALE_WINDOW"):
        if not window.isdecimal() or int(window) == 0:
            raise ConfigError(f"PENJING_LOSS_SCALE_WINDOW={window}: write a number of steps, 1 or more")
        changes["loss_scale_window"] = int(window)
    if names := environment.get("PENJING_FP32_OPS"):
        rules = tuple(Rule(match=name.strip(), compute="fp32") for name in names.split(",") if name.strip())
        changes["policy"] = (*changes.get("policy", config.policy), *rules)
    return config.model_copy(update=changes)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether `device` has instructions for bfloat16 products; a processor without them takes up to 60 times as long as
    for float32 (measured with AVX2 alone)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        says = getattr(torch.get_device_module(device), "is_bf16_supported", None)  # as XPUs and NPUs have it
        return says is not None and bool(says())
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def for_devices(config: PrecisionConfig, have_bfloat16: bool) -> PrecisionConfig:
    """`config` with "auto" replaced by what suits devices that all have instructions for bfloat16, or not."""
    best: Mode = "bf16" if have_bfloat16 else "fp32"
    schedule = tuple(
        phase.model_copy(update={"mode": best}) if phase.mode == "auto" else phase for phase in config.schedule
    )
    return config.model_copy(update={"mode": best if config.mode == "auto" else config.mode, "schedule": schedule})


def slow_modes(config: PrecisionConfig, device: torch.device) -> str:
    """What to tell the user about modes that `device` computes without instructions of its own; empty if there are
    none."""
    if device.type != "cpu":
        return ""
    slow = sorted(config.modes & ({"fp16"} if multiplies_bfloat16(device) else {"fp16", "bf16", "hybrid"}))
    if not slow:
        return ""
    return f"precision.mode = {slow[0]!r} is up to 100 times slower than 'fp32' on this processor; 'auto' chooses"


def check_hardware(config: PrecisionConfig, device: torch.device) -> None:
    """Refuse what the device cannot compute.

    Raises:
        ConfigError: tf32 without an Ampere GPU, fp8 without an Ada or Hopper GPU.
    """
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    capability = 10 * major + minor
    name = "a CPU" if device.type == "cpu" else f"an accelerator of type {device.type!r}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else name
    if "tf32" in config.modes and capability < 80:
        raise ConfigError(
            f"precision.mode = 'tf32' needs an NVIDIA GPU of compute capability 8.0 or more, this run is on {name}; "
            "use 'fp32' or 'bf16'"
        )
    if any(rule.compute == "fp8" for rule in config.policy) and capability < 89:
        raise ConfigError(
            "precision.policy asks for fp8, which needs an NVIDIA GPU of compute capability 8.9 or more, this run "
            f"is on {name}; "
            "use 'bf16'"
        )


class Precision:
    """The precision of one model: `switch` it before each step, compute under `evaluation()` in float32.

    Args:
        gather: told of each change, so that parameters that are collected before their use are collected in the format
            that they are read in (see `penjing.train.parallel.shard.gather_in`).
    """

    def __init__(
        self, model: nn.Module, config: PrecisionConfig, device: torch.device, gather: Gather | None = None
    ) -> None:
        check_hardware(config, device)
        self._gather = gather
        self.config = for_devices(config, multiplies_bfloat16(device))
        self._model = model
        self._device = device
        self._mode: Mode | None = None
        self._in_evaluation = False
        for rule in config.policy:
            if rule.match not in GROUPS and not any(
                fnmatch.fnmatch(name, rule.match) for name, _ in model.named_modules()
            ):
                names = [name for name, _ in model.named_modules() if name]
                raise ConfigError(
                    f"precision.policy: {rule.match!r} is no group ({', '.join(GROUPS)}) and matches no module; "
                    f"modules are called {', '.join(names[:4])} …"
                )
        self.switch(0, 1)

    @property
    def mode(self) -> Mode:
        """The mode in force."""
        assert self._mode is not None
        return self._mode

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through float16, in which small ones vanish. The same in every process."""
        return self.mode == "fp16" or any(each.compute == "fp16" for each in self.config.policy)

    def switch(self, step: int, steps: int) -> None:
        """Put the mode of update `step` of `steps` in force; free when it does not change."""
        self._enter(self.config.mode_at(step, steps))

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Everything inside computes in IEEE float32."""
        before = self.mode
        self._enter("fp32", in_evaluation=True)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, mode: Mode, in_evaluation: bool = False) -> None:
        if (mode, in_evaluation) == (self._mode, self._in_evaluation):
            return
        self._mode, self._in_evaluation = mode, in_evaluation
        if self._device.type == "cuda":
            allow_tf32(mode == "tf32")
        rules = () if in_evaluation else self.config.policy
        if mode == "hybrid":
            rules = (*_HYBRID, *rules)
        for part in getattr(self._model, "parts", [self._model]):  # a pipeline calls each of its stages
            formats = set_formats(part, _BASE[mode], rules, self._device.type)
            if self._gather is not None:
                self._gather(part, _read_in_16_bits(part, formats))


def allow_tf32(allowed: bool) -> None:
    """Whether GPUs multiply and convolve float32 in TensorFloat-32, for the whole process.

    By the settings that torch 2.13's own compiler asks for: it raises where only their successors `fp32_precision` were
    set, which these set too.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def set_formats(model: nn.Module, base: Format, rules: tuple[Rule, ...], device_type: str) -> dict[str, Format]:
    """Make every module of `model` compute in the format of the last rule that matches it or a module around it.

    A module whose format differs from that of the module around it gets a subclass of its own class, whose forward
    opens a `torch.autocast` region; the same call with other rules changes or removes the regions.

    Returns:
        The format of each module, by name.
    """
    softmax = next((rule.compute for rule in reversed(rules) if rule.match == "softmax"), None)
    chosen: dict[str, tuple[int, Format]] = {}
    for name, module in model.named_modules():
        inherited = chosen[name.rpartition(".")[0]] if name else (-1, base)
        own = max((index for index, rule in enumerate(rules) if _matches(rule.match, name, module)), default=-1)
        chosen[name] = (own, rules[own].compute) if own > inherited[0] else inherited
        around = inherited[1] if name else "fp32"
        compute = None if chosen[name][1] == around else chosen[name][1]
        # On the attention module, not on the root: a block that is recomputed must find it again.
        wide_softmax = softmax == "fp32" and chosen[name][1] != "fp32" and _matches("attention", name, module)
        _set_region(module, (compute, device_type, around == "fp32", wide_softmax))
    return {name: format for name, (_, format) in chosen.items()}


def _read_in_16_bits(model: nn.Module, formats: Mapping[str, Format]) -> dict[nn.Module, torch.dtype]:
    """The modules whose parameters are only ever read in 16 bits, rounded as autocast rounds them, and that format. An
    fp8 product scales its weight first, which another rounding before it would change."""
    return {
        module: _AUTOCAST[formats[name]]
        for name, module in model.named_modules()
        if formats[name] in ("bf16", "fp16") and _is_product(type(module))
    }


def _is_product(kind: type[nn.Module]) -> bool:
    beneath = getattr(kind, "_penjing_beneath", kind)
    return beneath.forward in _PRODUCTS or getattr(beneath, "is_product", False)


def _matches(match: str, name: str, module: nn.Module) -> bool:
    kind = type(module).__name__
    if match == "norms":
        return "Norm" in kind
    if match == "attention":
        return "Attention" in kind
    if match == "embeddings":
        return isinstance(module, nn.Embedding)
    if match == "convolutions":
        return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if match == "linears":
        return isinstance(module, nn.Linear)
    if match == "head":
        return isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("lm_head", "fc", "classifier", "head")
    return match != "softmax" and fnmatch.fnmatch(name, match)


def _set_region(module: nn.Module, region: tuple[Format | None, str, bool, bool]) -> None:
    if not hasattr(module, "_penjing_region"):
        if region[0] is None and not region[3]:
            return
        module.__class__ = _with_region(type(module))
    module._penjing_region = region  # pyright: ignore[reportArgumentType]


@functools.cache
def _with_region(original: type[nn.Module]) -> type[nn.Module]:
    # A subclass, not a wrapped forward: a deep copy (a distillation teacher) then computes with its own weights.
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compute, device_type, in_fp32, wide_softmax = self._penjing_region
        if compute == "fp32":
            args, kwargs = _widen(args), _widen(kwargs)
        if compute == "fp8" and isinstance(self, nn.Linear):
            output = fp8_linear(args[0], self.weight, self.bias)
        else:
            with _region(compute, device_type), _Fp32Softmax(device_type) if wide_softmax else nullcontext():
                output = original.forward(self, *args, **kwargs)
        # What is around computes in float32 without autocast, and would refuse another format.
        return _widen(output) if compute not in (None, "fp32") and in_fp32 else output

    members = {"forward": forward, "_penjing_beneath": original, "__module__": original.__module__}
    return type(original.__name__, (original,), members)


def _region(compute: Format | None, device_type: str) -> AbstractContextManager[Any]:
    if compute is None:
        return nullcontext()
    if compute == "fp32":
        return torch.autocast(device_type, enabled=False)
    return torch.autocast(device_type, dtype=_AUTOCAST[compute])


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _widen(item) for key, item in value.items()}
    return type(value)(_widen(item) for item in value) if type(value) in (tuple, list) else value


class _Fp32Softmax(TorchFunctionMode):
    """Softmax and the attention around it in float32, wherever a model calls them."""

    _OPS = frozenset({F.scaled_dot_product_attention, F.softmax, torch.softmax, torch.Tensor.softmax})

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._OPS:
            return func(*args, **kwargs)
        with torch.autocast(self._device_type, enabled=False):
            return func(*_widen(args), **_widen(kwargs))
