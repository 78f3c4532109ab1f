"""What the serving stage can do with a family of networks: one table of callables, `FAMILY` of each family's module.

A *batched* model has no state of its own: tensors in, tensors out, rows of several requests in one run. Its family
gives a `Signature`, a `BatchModel` and a `Workload`, and `batched.py` makes the table of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from penjing.core.artifact.parity import Bound, Difference
from penjing.core.config import Config, apply_override, parse_config
from penjing.core.errors import PenjingError, RequestError
from penjing.core.family import family_of, table_of

if TYPE_CHECKING:
    from penjing.serve.client.client import AsyncClient, Client
    from penjing.serve.engine.config import BatchConfig

Form = Literal["onnxruntime", "python"]
"""The backend of Triton server behind an entry of a model repository."""
Arrays = Mapping[str, np.ndarray]
Answer = dict[str, np.ndarray] | PenjingError


PARITY_ROWS = 16  # of a request, where the server takes as many
TOO_MANY = "batch-size must be <="  # as Triton server says it
T = TypeVar("T")


def in_parts(rows: int, ask: Callable[[slice], T]) -> list[T]:
    """What `ask` gives for the parts of so many rows; parts become smaller where the server takes fewer at once."""
    found, at, size = [], 0, PARITY_ROWS
    while at < rows:
        try:
            found.append(ask(slice(at, at + size)))
            at += size
        except RequestError as error:
            if size == 1 or TOO_MANY not in str(error):
                raise
            size //= 2
    return found


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a request or of its answer: `shape` is one row's, -1 where a size may vary; `datatype` is Triton
    server's ("FP32", "UINT8", "INT64", "BYTES" …). One number a row, whose shape is (), travels as (1,)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()
    """Of an output whose columns are classes."""


@dataclass(frozen=True)
class Signature:
    """What Triton server must know of a model before it is loaded. `name` is the model's on the server; `file_inputs`
    are the tensors that its ONNX file takes by itself. Where it is not `batched`, shapes are those of whole tensors,
    and a request is computed as it is."""

    name: str
    inputs: tuple[TensorSpec, ...]
    file_inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool = True


class BatchModel(Protocol):
    """A loaded model. `prepare` is called for each request, `start` once for those that came together."""

    def prepare(self, inputs: Arrays) -> Any:
        """Check and convert one request's tensors (rows, …) to something whose `len` is the rows.

        Raises:
            RequestError: names the tensor and the rule.
        """
        ...

    def start(self, requests: Sequence[Any], begun: Callable[[], None]) -> Callable[[], Sequence[Answer]]:
        """Begin to compute the answers of `requests`, as `prepare` returned them; several batches may be under way.

        A row's answer depends on that row alone.

        Args:
            begun: is called, from another thread, when the first row is computed.

        Returns:
            A function that waits and gives the answer of each request, or the error that is its alone; batches are
            finished in the order of `start`.
        """
        ...

    def example(self) -> Any:
        """A small request, as `prepare` returns it: it warms the model up, and shows later that it is alive."""
        ...


@dataclass(frozen=True)
class BatchPart:
    """A batched model as Triton server's Python process knows it: its `name` there, its settings, and how it is loaded
    from a folder with them (raises InputError)."""

    name: str
    settings: type[BatchConfig]
    load: Callable[[Path, Any], BatchModel]


@dataclass(frozen=True)
class Workload:
    """What `penjing bench server` times of a batched model: the same rows in this process and through a server.

    `unit` is what a row is called ("images"). `alone` computes a turn's rows in this process and returns how many.
    `forms` are the ways to ask the server, by the name that the result gives them: the inputs of requests of
    `request_rows` rows each, which `ask` sends; `num_requests` of them are a turn, `streams` always under way.
    """

    unit: str
    alone: Callable[[], int]
    forms: Mapping[str, Sequence[Any]]
    request_rows: int
    ask: Callable[[AsyncClient, Any], Awaitable[object]]
    num_requests: int
    streams: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the result, as they are."""


@dataclass(frozen=True)
class Entry:
    """A model's folder in a model repository for a `tritonserver` that somebody else starts: `write` fills it; `note`
    is what the user must know of it. `beside` fill the folders of models that it asks, by their names."""

    write: Callable[[Path], None]
    note: str = ""
    beside: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """What an endpoint answered to the inputs of an artifact's parity record.

    `answers` are JSON-ready, as the family stores them. `differences` are held to `bound`, which is the record's, from
    the fake-quantized model; None: they are recorded alone. `same_bits`: whether every number is what the artifact
    gives in this process; None where it does not run here.
    """

    answers: Any
    differences: tuple[Difference, ...]
    bound: Bound | None = None
    same_bits: bool | None = None


@dataclass(frozen=True)
class Family:
    """What the serving stage can do with a family of networks; all but `settings` and `check` may trust their inputs.

    Attributes:
        name: the model's name on the server.
        settings: what `penjing serve --set` changes.
        queued_by_server: Triton server holds the requests that wait, so it drains them too.
        check: (folder, settings) → the absolute folder of a model that can be served here. Raises InputError for a
            damaged one, or for a checkpoint of which an artifact is to be made first, and says how; ConfigError for
            settings that ask for a device that is not there.
        repository: (folder, settings, scratch) → the repository that our Triton server shall read; `scratch` is where
            one may be made.
        entry: (folder, settings, form) → what to write for another server; a form of None is the family's choice.
            Raises ConfigError for a form that it does not have.
        ask: (client, seconds) asks the served model as a client would. Raises PenjingError.
        load: (folder, settings) → the model behind a batched entry, in the server's Python process; None where the
            family has an entry of its own. Raises InputError.
        workload: (folder, client, **options) → what to time; the client's server is asked first whether it gives the
            answers of `folder`, and refused with a ServerError if not. None: it is timed in tokens.
        parity: (folder of an artifact, client) → what the served model answers to the inputs of the artifact's parity
            record. Raises InputError for a damaged one, or for an endpoint that has a model of another shape. None: it
            is not asked.
        as_recorded: settings ("key=value") under which a server computes as that record's own answers were computed.
    """

    name: str
    settings: type[Config]
    queued_by_server: bool
    check: Callable[[Path, Any], Path]
    repository: Callable[[Path, Any, Path], Path]
    entry: Callable[[Path, Any, Form | None], Entry]
    ask: Callable[[Client, float], None]
    load: Callable[[Path, Any], BatchModel] | None = None
    workload: Callable[..., Workload] | None = None
    parity: Callable[[Path, Client], Served] | None = None
    as_recorded: tuple[str, ...] = ()


def family_at(folder: Path) -> Family:
    """The table of the family of the model in `folder`. A folder without `config.json` counts as a decoder's, whose
    `check` says what it lacks.

    Raises:
        InputError: it is of no family that can be served.
    """
    return table_of("serve", family_of(folder) if (folder / "config.json").is_file() else "decoder")


def read_overrides(settings: type[Config], overrides: list[str]) -> Config:
    """The settings that "key=value" texts ask for.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    return parse_config(settings, values, "--set")
