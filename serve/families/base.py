"""What a served model without a state of its own is: tensors in, tensors out, rows of several requests in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a request or of its answer: `shape` is one row's, -1 where a size may vary; `datatype` is Triton
    server's ("FP32", "UINT8", "INT64", "BYTES" …)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()
    """Of an output whose columns are classes."""


@dataclass(frozen=True)
class Signature:
    """What Triton server must know of a model before it is loaded. `name` is the model's on the server; `file_inputs`
    are the tensors that its ONNX file takes by itself."""

    name: str
    inputs: tuple[TensorSpec, ...]
    file_inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class BatchModel(Protocol):
    """A loaded model. `prepare` is called for each request, `start` once for those that came together."""

    def prepare(self, inputs: Arrays) -> Any:
        """Check and convert one request's tensors (rows, …).

        Raises:
            RequestError: names the tensor and the rule.
        """
        ...

    def start(self, requests: Sequence[Any], begun: Callable[[], None]) -> Callable[[], list[dict[str, np.ndarray]]]:
        """Begin to compute the answers of `requests`, as `prepare` returned them; several batches may be under way.

        A row's answer depends on that row alone.

        Args:
            begun: is called, from another thread, when the first row is computed.

        Returns:
            A function that waits and gives the answer of each request; batches are finished in the order of `start`.
        """
        ...

    def warm_up(self) -> None:
        """Run once, as a first request would.

        Raises:
            PenjingError: the model does not run here.
        """
        ...
