"""Tensors by the names of a network's inputs: .npz, .npy and .safetensors files, and what a user's function yields."""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from penjing.core.errors import InputError
from penjing.core.imports.user_code import named_errors, user_function
from penjing.core.memory import available_bytes
from penjing.core.progress import volume
from penjing.train.sources.source import Label, Source, content_digest

LABELS = ("labels", "label")
_UNNAMED = "0"  # the first tensor, by its place
_MOST = 1 << 20  # samples of a function, which are held in memory
_kept: ContextVar[dict[str, dict[str, NDArray[Any]]] | None] = ContextVar("sources_kept", default=None)
_BROKEN = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    AttributeError,  # of NumPy, for a file of one array
    MemoryError,  # an array that claims to be larger than memory
    RecursionError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    NotImplementedError,  # a compression that Python does not know
    SafetensorError,
)


def read_arrays(path: Path, labels: bool) -> Source:
    """The rows of the tensors in a .npz or .safetensors file; one called "labels" holds the classes. A .npy file holds
    one tensor without a name.

    Raises:
        InputError: damaged, pickled, empty, or with other counts of rows.
    """
    try:
        if path.suffix.lower() == ".npy":
            with open(path, "rb") as opened:
                arrays = {_UNNAMED: np.load(opened, allow_pickle=False)}
        elif path.suffix.lower() == ".npz":
            with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        else:
            arrays = {name: _numpy(tensor) for name, tensor in load_file(path).items()}
    except _BROKEN as error:
        raise InputError(f"{path} cannot be read: {error}; write it again, without pickled objects") from error
    return _rows(str(path), arrays, labels)


def call_function(spec: str, labels: bool) -> Source:
    """What the function of "file.py:function" yields: batches of inputs, or pairs of such a batch and its labels.

    A batch is a tensor, a list of tensors in the order of the network's inputs, or a mapping by their names; axis 0
    holds the samples. A list with one tensor more ends with the labels, see `with_last_as_labels`; a mapping or a list
    of tensors in a list is a pair with what follows, as torch's DataLoader collates one.

    Raises:
        InputError: the file or function is missing or raises, yields something else, or more than memory holds.
    """
    kept = _kept.get()
    arrays = _called(spec) if kept is None or spec not in kept else kept[spec]
    if kept is not None:
        kept[spec] = arrays
    return _rows(spec, arrays, labels)


@contextmanager
def calling_once() -> Iterator[None]:
    """In here each function is called once, and all see what it yielded then: one that draws or shuffles would give
    every step other samples, which no step can be compared on."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def with_last_as_labels(source: Source, inputs: int, wanted: bool) -> Source:
    """`source`, whose rows have one tensor more than the network's `inputs`, with that as its classes: so the batches
    of torch's DataLoader are, lists. Any other source as it is.

    Args:
        wanted: else it is left out.

    Raises:
        InputError: it is not one whole number a row.
    """
    first, last = source.load(0), str(inputs)
    if not isinstance(first, Mapping) or list(first) != [str(place) for place in range(inputs + 1)]:
        return source

    def load(index: int) -> Mapping[str, NDArray[Any]]:
        row: Any = source.load(index)
        return {name: value for name, value in row.items() if name != last}

    rows: list[Any] = [source.load(index) for index in range(source.size if wanted else 0)]
    classes = _classes(source.where, np.array([row[last] for row in rows])) if wanted else None
    return replace(source, load=load, labels=classes)


def _called(spec: str) -> dict[str, NDArray[Any]]:
    function = user_function(spec)
    batches: list[dict[str, NDArray[Any]]] = []
    samples = held = 0
    room = available_bytes() // 3  # they are joined at the end, beside the pieces
    with named_errors(spec):
        found: Iterable[Any] = function()
        for item in found:
            batches.append(_batch(item, spec))
            samples += len(next(iter(batches[-1].values())))
            held += sum(value.nbytes for value in batches[-1].values())
            if held > room:
                raise InputError(
                    f"{spec} has yielded {samples} samples of {volume(held)} and goes on; all are held in memory, so "
                    "let it end sooner"
                )
            if samples >= _MOST:
                break
    if not batches:
        raise InputError(f"{spec} yields nothing; it has to yield batches of inputs")
    names = set(batches[0])
    if any(set(batch) != names for batch in batches):
        raise InputError(f"{spec} yields {sorted(names)} first and other names later; yield the same each time")
    try:
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    except ValueError as error:
        raise InputError(f"{spec} yields batches of different shapes ({error}); make them alike") from None


def _batch(item: Any, spec: str) -> dict[str, NDArray[Any]]:
    inputs, labels = item if _is_pair(item) else (item, None)
    if isinstance(inputs, Mapping):
        found = {str(name): _numpy(value) for name, value in inputs.items()}
    elif isinstance(inputs, list | tuple):
        found = {f"{place}": _numpy(value) for place, value in enumerate(inputs)}
    else:
        found = {_UNNAMED: _numpy(inputs)}
    if labels is not None:
        found["labels"] = _numpy(labels)
    lengths = {len(value) if value.ndim else -1 for value in found.values()}
    if len(lengths) != 1 or -1 in lengths:
        raise InputError(f"{spec} yields a batch whose tensors have different counts of samples on axis 0; mend it")
    return found


def _is_pair(item: Any) -> bool:
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    inputs = item[0]
    several = isinstance(inputs, list | tuple) and all(isinstance(each, torch.Tensor) for each in inputs)
    return isinstance(item, tuple) or isinstance(inputs, Mapping) or several


def _numpy(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    found = np.asarray(value)
    if found.dtype.kind not in "biuf":
        raise InputError(f"a value of type {type(value).__name__} is no tensor of numbers; yield tensors")
    return found


def _rows(where: str, arrays: dict[str, NDArray[Any]], wanted: bool) -> Source:
    name = next((name for name in LABELS if name in arrays), None)
    classes = arrays[name] if name else None
    arrays = {other: array for other, array in arrays.items() if other != name}
    if not arrays or any(not isinstance(array, np.ndarray) or not array.ndim for array in arrays.values()):
        raise InputError(f"{where} holds no tensors with a row a sample; name them after the network's inputs")
    sizes = {name: len(array) for name, array in arrays.items()} | ({} if classes is None else {"labels": len(classes)})
    if len(set(sizes.values())) != 1 or not next(iter(sizes.values())):
        raise InputError(f"{where} holds {sizes} rows; as many of all are needed, and one at least")
    labels: Sequence[Label] | None = None
    if wanted and classes is not None:
        labels = _classes(where, classes)

    def load(index: int) -> Mapping[str, NDArray[Any]]:
        return {name: array[index] for name, array in arrays.items()}

    def digest(index: int) -> int:
        return content_digest(b"".join(array[index].tobytes() for array in arrays.values()))

    size = next(iter(sizes.values()))
    return Source(where, size, load, lambda index: f"row {index} of {where}", digest, labels)


def _classes(where: str, labels: NDArray[Any]) -> list[int]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(
            f"{where}: labels are {labels.dtype}{list(labels.shape)}, not one whole number a row; mend them, or set "
            "data.labels = false"
        )
    return labels.astype(np.int64).tolist()
