"""Activation checkpointing (Chen et al., https://arxiv.org/abs/1604.06174), applied to a model's blocks from outside.

full        a block keeps its input only; its forward pass runs again in the backward pass
selective   a block keeps the results of matrix products, convolutions and attention, and recomputes what is cheap
none        everything is kept
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from penjing.core.config import Config
from penjing.core.errors import ConfigError

Recompute = Literal["none", "selective", "full"]
_EXPENSIVE = ("mm", "addmm", "bmm", "baddbmm", "convolution", "linear", "_scaled_mm", "mkldnn_convolution")


class RecomputeRule(Config):
    """What some blocks recompute."""

    match: str = Field(description="A pattern of the names of blocks.")
    recompute: Recompute = Field(description="What these blocks compute again in the backward pass.")


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of a model, by name: the members of its outermost ModuleLists and Sequentials that hold
    modules."""
    found: dict[str, nn.Module] = {}
    _find_blocks(model, "", found)
    return found


def _find_blocks(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList | nn.Sequential):
            if any(True for _ in child.children()):
                found[path] = child
        else:
            _find_blocks(child, f"{path}.", found)


def apply_recompute(model: nn.Module, default: Recompute, rules: tuple[RecomputeRule, ...] = ()) -> None:
    """Make the blocks of `model` recompute as `default` says, or as the last rule that matches their name.

    Raises:
        ConfigError: a rule matches no block, or the model has none.
    """
    names = blocks(model)
    for rule in rules:
        if not fnmatch.filter(names, rule.match):
            raise ConfigError(
                f"memory.recompute_rules: {rule.match!r} matches no block; blocks are {', '.join(names) or 'none'}"
            )
    if default != "none" and not names:
        raise ConfigError(f"memory.recompute = {default!r}: this model has no repeated blocks; write 'none'")
    for name, block in names.items():
        matching = [rule.recompute for rule in rules if fnmatch.fnmatch(name, rule.match)]
        chosen = matching[-1] if matching else default
        if chosen != "none":
            block.__class__ = _recomputing(type(block), chosen == "selective")


@functools.cache
def _recomputing(original: type[nn.Module], selective: bool) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original.forward(self, *args, **kwargs)
        contexts = functools.partial(_contexts, self, selective)
        return checkpoint(
            functools.partial(original.forward, self), *args, use_reentrant=False, context_fn=contexts, **kwargs
        )

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})


def _contexts(block: nn.Module, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if selective:
        first, again = create_selective_checkpoint_contexts(_keep_expensive)
    return first, _both(again, _still_statistics(block))


def _keep_expensive(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition("::")[2].partition(".")[0]
    keep = name in _EXPENSIVE or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _still_statistics(block: nn.Module) -> Iterator[None]:
    """Batch norms inside normalise by the batch but leave their running statistics: the first forward has moved
    them."""
    norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    kept = [(norm.running_mean, norm.running_var, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.running_mean, norm.running_var = _copy(norm.running_mean), _copy(norm.running_var)
        norm.num_batches_tracked = _copy(norm.num_batches_tracked)
    try:
        yield
    finally:
        for norm, (mean, variance, count) in zip(norms, kept, strict=True):
            norm.running_mean, norm.running_var, norm.num_batches_tracked = mean, variance, count


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()
