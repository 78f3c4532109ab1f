"""Samples become batches: read and decoded by threads, fitted to the network, what is broken left out and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.graph.config import GraphConfig, Pixels, TensorSpec
from penjing.core.images.decode import arranged, network_input
from penjing.core.progress import plural
from penjing.core.text.network_inputs import Texts, texts_of
from penjing.train.sources.decoders import decoded
from penjing.train.sources.settings import SourceSettings
from penjing.train.sources.source import Source, Values
from penjing.train.sources.tensors import with_last_as_labels

NO_CLASS = -1
_UNNAMED = "arr_0"  # what numpy.savez calls an array that nobody named
Change = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
"""What augmentation does with images (N, height, width, channels)."""


class UnfitError(InputError):
    """What no other sample would mend."""


@dataclass(frozen=True)
class Form:
    """What a network takes, and how many classes it tells apart (0: it has none), with their names where known."""

    inputs: tuple[TensorSpec, ...]
    pixels: Pixels | None = None
    classes: int = 0
    names: tuple[str, ...] = ()
    texts: Texts | None = None


def form_of(config: GraphConfig, folder: Path | None = None) -> Form:
    """The form of a graph: its first output has classes if it is floating and (batch, classes).

    Args:
        folder: where its tokenizer lies, if it has one.

    Raises:
        InputError: it takes numbers that no samples hold.
    """
    for spec in config.inputs:
        if spec.dtype == "bfloat16":
            raise InputError(f"no samples hold bfloat16, which {spec} takes: import the network with --dtype float32")
    first = config.outputs[0]
    last = first.shape[-1] if len(first.shape) == 2 and first.dtype.startswith(("float", "bfloat")) else 0
    known = config.meaning in ("classes", "tensors") and isinstance(last, int)
    texts = None if folder is None else texts_of(folder, config.inputs)
    return Form(config.inputs, config.pixels, int(last) if known else 0, config.labels, texts)


@dataclass
class Reader:
    """The samples `indices` of a source, by their places there.

    Attributes:
        targets: (len(indices),) int64, the class of each; None: the source has none that the network can use.
        broken: what could not be read → why.
    """

    source: Source
    indices: NDArray[np.int64]
    form: Form
    settings: SourceSettings
    note: Callable[[str], None]
    targets: NDArray[np.int64] | None = None
    broken: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.indices):
            raise InputError(f"{self.source.where} has no sample for this; give more, or another data.held_out")
        self.source = with_last_as_labels(self.source, len(self.form.inputs), self.settings.labels)
        if self.source.labels is not None:
            self.targets = targets_of(self.source, self.form)[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def batch(
        self,
        places: Sequence[int] | NDArray[np.int64],
        change: Change | None = None,
        shown: NDArray[np.float64] | None = None,
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.int64]]:
        """The inputs of the samples at `places` by name, (N, …) each, and their classes (N,), `NO_CLASS` without any.

        The sample after one that cannot be read is taken in its place, so that batches stay whole.

        Args:
            change: of fitted images.
            shown: (N, 4), the part of each image that is shown in place of all; see `decode_image`.

        Raises:
            InputError: more are broken than `settings.max_broken`, or they do not fit the network.
        """
        with ThreadPoolExecutor(min(self.settings.workers, max(len(places), 1))) as pool:
            found = list(pool.map(self._read, map(int, places), [None] * len(places) if shown is None else shown))
        taken = np.array([place for place, _ in found])
        targets = np.full(len(taken), NO_CLASS) if self.targets is None else self.targets[taken]
        values = [value for _, value in found]
        if isinstance(values[0], Mapping):
            return self._arrays(values), targets
        if isinstance(values[0], str):
            assert self.form.texts is not None
            return self.form.texts.arrays(values, self.settings.text_tokens), targets
        images = np.stack(values)
        images = images if change is None else change(images)
        return {self.form.inputs[0].name: self.normalised(images)}, targets

    def images(self, places: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """As `batch`, but fitted images (N, height, width, channels) that are not normalised.

        Raises:
            InputError: as there, or the samples are no images.
        """
        kept = []
        with ThreadPoolExecutor(min(self.settings.workers, max(len(places), 1))) as pool:
            for place, value in pool.map(self._read, map(int, places)):
                if not isinstance(value, np.ndarray):
                    raise InputError(f"{self.source.where} holds no images, and this network takes images alone")
                kept.append((place, value))
        taken = np.array([place for place, _ in kept])
        targets = np.full(len(taken), NO_CLASS) if self.targets is None else self.targets[taken]
        return np.stack([value for _, value in kept]), targets

    def normalised(self, images: NDArray[np.uint8]) -> NDArray[Any]:
        """Images (N, height, width, channels) as the network's input."""
        assert self.form.pixels is not None
        laid = np.stack([arranged(image, self.form.pixels) for image in images])
        return np.ascontiguousarray(network_input(laid, self.form.pixels, self.form.inputs[0].dtype))

    def _read(self, place: int, shown: NDArray[np.float64] | None = None) -> tuple[int, Any]:
        for step in range(len(self.indices)):
            at = (place + step) % len(self.indices)
            index = int(self.indices[at])
            said = self.source.said(index)
            if said in self.broken:
                continue
            try:
                return at, self._one(self.source.load(index), shown)
            except UnfitError:
                raise
            except InputError as error:
                self._leave_out(said, str(error))
        raise AssertionError("the share of broken samples is checked")

    def _one(self, values: Values, shown: NDArray[np.float64] | None) -> Any:
        if isinstance(values, Mapping):
            return values
        if isinstance(values, str):
            if self.form.texts is None:
                raise UnfitError(
                    f"{self.source.where} holds texts, and the network takes {', '.join(map(str, self.form.inputs))}, "
                    "with no tokenizer; import one that takes tokens with --tokenizer, or give tensors"
                )
            return values
        if self.form.pixels is None:
            raise UnfitError(
                f"{self.source.where} holds images, and nothing says how they become {self.form.inputs[0]}; import the "
                "network again and say what it does to pixels, such as --size 224x224 --mean 0.485,0.456,0.406 --std "
                "0.229,0.224,0.225, or give tensors"
            )
        if len(self.form.inputs) != 1:
            names = ", ".join(spec.name for spec in self.form.inputs)
            raise UnfitError(
                f"{self.source.where} holds images, the network takes {names}; give tensors by these names"
            )
        part = None if shown is None else tuple(map(float, shown))
        return decoded(values, self.form.pixels, part, min(self.settings.processes, self.settings.workers))

    def _leave_out(self, said: str, reason: str) -> None:
        if said not in self.broken:
            self.broken[said] = reason
            self.note(f"{said} is left out: {reason}")
        if len(self.broken) > self.settings.max_broken * len(self.indices) or len(self.broken) == len(self.indices):
            first, why = next(iter(self.broken.items()))
            raise UnfitError(
                f"{len(self.broken)} of {len(self.indices)} samples of {self.source.where} cannot be read, more than "
                f"data.max_broken = {self.settings.max_broken:g} allows; the first is {first}: {why}"
            )

    def _arrays(self, rows: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
        specs, names = self.form.inputs, list(rows[0])
        if names == [str(place) for place in range(len(specs))]:
            by_name = dict(zip([spec.name for spec in specs], names, strict=True))
        elif len(specs) == len(names) == 1:
            by_name = {specs[0].name: names[0]}
            if names[0] not in (specs[0].name, _UNNAMED):
                self.note(
                    f"{self.source.where} has no {specs[0].name}; its only tensor beside classes, {names[0]}, is taken "
                    "for it"
                )
        else:
            by_name = {spec.name: spec.name for spec in specs}
        if missing := [name for name in by_name.values() if name not in names]:
            raise InputError(
                f"{self.source.where} has {', '.join(names)}, the network takes {', '.join(map(str, specs))}; there is "
                f"no {missing[0]}"
            )
        return {spec.name: self._fitting(spec, np.stack([row[by_name[spec.name]] for row in rows])) for spec in specs}

    def _fitting(self, spec: TensorSpec, values: NDArray[Any]) -> NDArray[Any]:
        wanted = spec.shape[1:]
        fits = values.ndim == len(spec.shape) and all(
            isinstance(size, str) or size == given for size, given in zip(wanted, values.shape[1:], strict=False)
        )
        dtype = np.dtype(spec.dtype)
        if not fits or values.dtype.kind not in {"f": "f", "b": "b"}.get(dtype.kind, "iu"):
            raise InputError(
                f"{self.source.where} gives {values.dtype}{list(values.shape)} for {spec}; give what the network takes"
            )
        if values.dtype.kind == "f" and np.isnan(values.sum()) and np.isnan(values).any():
            raise InputError(f"{self.source.where} holds values for {spec.name} that are no numbers (NaN); mend them")
        return values.astype(dtype, copy=False)


def targets_of(source: Source, form: Form) -> NDArray[np.int64]:
    """The class of each sample, as the network counts them.

    Raises:
        InputError: the network tells no classes apart, or other ones.
    """
    labels = source.labels
    assert labels is not None
    without = "set data.labels = false to take the samples without them"
    if not form.classes:
        raise InputError(f"{source.where} has classes, and the network tells none apart; {without}")
    if all(isinstance(label, int) for label in labels):
        low, high = min(map(int, labels)), max(map(int, labels))  # of any size: not every one fits into 64 bits
        if low < 0 or high >= form.classes:
            raise InputError(
                f"{source.where} has classes from {low} to {high}, the network {form.classes} from 0 on; give labels "
                f"of this network, or {without}"
            )
        return np.array(labels, np.int64)
    names = form.names or tuple(sorted({str(label) for label in labels}))
    if len(names) != form.classes:
        raise InputError(
            f"{source.where} has {plural(len(names), 'class', 'classes')}, the network {form.classes}; name the "
            f"classes' folders as `labels` in its config.json does, or {without}"
        )
    places = {name: place for place, name in enumerate(names)}
    if unknown := sorted({str(label) for label in labels} - places.keys()):
        raise InputError(
            f"{source.where} has the class {unknown[0]!r}, which is none of the network's ({', '.join(names[:5])} …); "
            f"rename it, or {without}"
        )
    return np.array([places[str(label)] for label in labels], np.int64)
