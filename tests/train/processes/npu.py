"""`penjing` on a machine with an accelerator of type "npu", which computes on the processor: run this as a script with
the arguments of the command line. The accelerator is added in torch's own way.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TYPE = "npu"
CPU = torch.device("cpu")
computed: Counter[str] = Counter()  # operations by name


class NPUTensor(torch.Tensor):
    """A tensor whose numbers are those of `raw`, in main memory."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> NPUTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device=torch.device(TYPE, 0)
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, *args, **(kwargs or {}))


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation with the raw tensors; what it makes is the accelerator's unless the processor is asked for."""
    computed[func._schema.name] += 1
    if func is torch.ops.aten.copy_.default:
        raw(args[0]).copy_(raw(args[1]))
        return args[0]
    found = func(*tree_map(raw, args), **tree_map(raw, kwargs))
    written = [
        place for place, each in enumerate(func._schema.arguments) if each.alias_info and each.alias_info.is_write
    ]
    if written and written[0] < len(args):
        return args[written[0]] if func._schema.returns else None
    if kwargs.get("device") is not None and torch.device(kwargs["device"]) == CPU:
        return found
    return tree_map(lambda each: NPUTensor(each) if isinstance(each, torch.Tensor) else each, found)


def raw(value: Any) -> Any:
    if isinstance(value, NPUTensor):
        return value.raw
    return CPU if isinstance(value, torch.device) else value


def register() -> None:
    _setup_privateuseone_for_python_backend(TYPE)
    library = torch.library.Library("_", "IMPL")
    library.fallback(compute, dispatch_key="PrivateUse1")
    register.kept = library  # type: ignore[attr-defined]  # an operator lives as long as its library
    torch.accelerator.synchronize = lambda *_: None  # nothing is ever under way
    torch.__future__.set_swap_module_params_on_conversion(True)


if __name__ == "__main__":
    register()
    from penjing.core.cli import main

    try:
        main()
    finally:
        print(f"{computed['aten::mm'] + computed['aten::addmm']} products on the {TYPE}")
