"""Starts of training in tests: a conftest that imports the fixture has it for all tests beside it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import pytest
import torch
from torch import nn

from penjing.train import run

_MOST = 50_000  # parts of what is described; what has more is counted anew


@pytest.fixture(scope="module", autouse=True)
def equal_networks_are_counted_once() -> Iterator[None]:
    """Before its first step a run counts the memory and the operations of its network on tensors without data, which
    takes half of a run so small. Here equal networks with equal objectives and batches are counted once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "estimate_memory", _estimate_memory)
        patch.setattr(run, "model_flops", _model_flops)
        yield


def once(count: Callable[..., Any]) -> Callable[..., Any]:
    """`count`, a function of what builds a network and of more, that is called once for what is equal."""
    found: dict[Any, Any] = {}

    @functools.wraps(count)
    def counted(build_model: Callable[[], nn.Module], *given: Any, **settings: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            key = Described().of((build_model(), given, settings))
        if key is None:
            return count(build_model, *given, **settings)
        if key not in found:
            found[key] = count(build_model, *given, **settings)
        return found[key]

    return counted


class Described:
    """What an object is made of: types, sizes and settings, and no values of tensors."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> tuple[str, tuple[type, ...]] | None:
        """A text and the types in it, several of which may have one name; None where there is too much."""
        kinds: list[type] = []
        parts: list[str] = []
        todo = [value]
        while todo:
            each = todo.pop()
            if len(parts) > _MOST:
                return None
            if each is None or isinstance(each, bool | int | float | str | bytes | torch.dtype | torch.device):
                parts.append(repr(each))
            elif id(each) in self._seen:
                parts.append(f"#{self._seen[id(each)][0]}")
            else:
                self._seen[id(each)] = len(self._seen), each  # kept, so that no other gets its id
                inside = self._inside(each)
                parts.append(f"{type(each).__qualname__}{len(inside)}")
                kinds.append(type(each))
                todo += inside
        return " ".join(parts), tuple(kinds)

    def _inside(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return [value.dtype, value.requires_grad, *value.shape]
        if isinstance(value, dict):
            return [each for pair in value.items() for each in pair]
        if isinstance(value, list | tuple):
            return list(value)
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, types.FunctionType):
            return [value.__module__, value.__qualname__, value.__code__.co_firstlineno, *(value.__closure__ or ())]
        if isinstance(value, types.CellType):
            try:
                return [value.cell_contents]
            except ValueError:  # nothing is in it yet
                return []
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, types.ModuleType | type | PurePath):
            return [getattr(value, "__name__", "")]
        slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        return [*slots, *(each for pair in getattr(value, "__dict__", {}).items() for each in pair)]


_estimate_memory, _model_flops = once(run.estimate_memory), once(run.model_flops)
