"""The parity record of an ONNX artifact: the fake-quantized network against every way in which ONNX Runtime may run it.

A family says what its record holds, how a file is run and how answers are compared. The ways (`Quantization.ways`), the
gate, and how a record is measured again are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from penjing.compress.graph.integers import IntegerRun
from penjing.compress.graph.roundings import roundings
from penjing.compress.quantize.targets import NO_TENSORRT
from penjing.compress.rounding.modes import set_mode
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx import ONNX_RUNTIME, OnnxArtifact, Quantization, gate_onnx
from penjing.core.artifact.parity import FAKE_QUANTIZED, FLOATING, Bound, Difference, Parity, is_within
from penjing.core.graph.network import Network
from penjing.core.progress import Progress

T = TypeVar("T", bound=OnnxArtifact)
A = TypeVar("A")


class OnnxParity(ABC, Generic[T, A]):
    """The inputs of a record of an artifact `T`; each implementation answers them by an `A`."""

    family: ClassVar[str]
    quantity: ClassVar[str]
    """What the bound is about."""
    statistic: ClassVar[Literal["largest", "mean"]]
    hint: ClassVar[str]
    """What a user can do who is refused."""
    keeps_all: ClassVar[bool] = True
    """Whether the record holds every implementation's answers, or the fake-quantized network's alone."""

    @staticmethod
    @abstractmethod
    def open(folder: Path) -> T:
        """Open an artifact and check every hash.

        Raises:
            InputError: missing or damaged files, or a folder of another kind.
        """

    @classmethod
    @abstractmethod
    def of(cls, artifact: T) -> tuple[Self, A]:
        """The inputs of an artifact's record, and the answers that its bound starts from.

        Raises:
            InputError: the record is damaged.
        """

    @abstractmethod
    def inputs(self) -> dict[str, Any]:
        """As the record stores them."""

    @abstractmethod
    def run(self, file: Path, options: dict[str, str], optimise: bool) -> A:
        """What `file` answers in ONNX Runtime with these session options, on one thread."""

    @abstractmethod
    def stored(self, answers: A) -> Any:
        """Answers as the record stores them."""

    @abstractmethod
    def differences(self, between: tuple[str, str], first: A, second: A) -> tuple[Difference, ...]:
        """How far two implementations are apart.

        Raises:
            InputError: NaN or infinity.
        """

    def measure(
        self,
        wanted: A,
        file: Path,
        quantization: Quantization,
        bound: float,
        floating: A | None = None,
        share: float = 0.0,
    ) -> Parity:
        """The record of an artifact that is being made.

        Args:
            wanted: what the fake-quantized network answers.
            file: the artifact's.
            bound: of `statistic` of `quantity`, in ONNX Runtime with the options that the artifact asks for.
            floating: what the network answers that does not round, if ONNX Runtime may be held to that beyond `bound`.
            share: by which it may be further from `floating` than the fake-quantized network is.

        Raises:
            InputError: the bound is exceeded (an artifact that does so is refused), or there is NaN.
        """
        limit = Bound(
            between=(FAKE_QUANTIZED, ONNX_RUNTIME), quantity=self.quantity, statistic=self.statistic, value=bound
        )
        found = self._answers(file, quantization)
        kept = {FAKE_QUANTIZED: wanted} | (found if self.keeps_all else {})
        differences = self._between(FAKE_QUANTIZED, wanted, found)
        if floating is not None and not is_within(differences, limit):
            moved = self.differences((FLOATING, FAKE_QUANTIZED), floating, wanted)[0]
            value = (1 + share) * getattr(moved, self.statistic)
            wider = limit.model_copy(update={"between": (FLOATING, ONNX_RUNTIME), "value": value})
            beside = self._between(FLOATING, floating, found)
            if is_within(beside, wider):
                limit, kept = wider, kept | {FLOATING: floating}
                differences = (*beside, moved, *differences)
        gate_onnx(differences, limit, self.hint)
        return Parity(
            family=self.family,
            inputs=self.inputs(),
            outputs={name: self.stored(answers) for name, answers in kept.items()},
            differences=differences,
            bound=limit,
            unmeasured={"tensorrt": NO_TENSORRT} if quantization.target == "tensorrt" else {},
        )

    @classmethod
    def compare(cls, artifact: T, file: Path, quantization: Quantization) -> tuple[Difference, ...]:
        """Run the record's inputs through `file`, the artifact's own or an export that takes its place.

        Raises:
            InputError: the record is damaged, or its bound is exceeded.
        """
        parity, wanted = cls.of(artifact)
        bound = artifact.parity.bound
        differences = parity._between(bound.between[0], wanted, parity._answers(file, quantization))
        gate_onnx(differences, bound, cls.hint)
        return differences

    @classmethod
    def rerun(cls, folder: Path, progress: Progress) -> tuple[Difference, ...]:
        """Run the record's inputs through the artifact in `folder` again, here and now; every hash is checked.

        Raises:
            InputError: damaged, or ONNX Runtime on this machine is further from the fake-quantized network than the
                record's bound.
        """
        artifact = cls.open(folder)
        progress.start("parity", 1)
        differences = cls.compare(artifact, folder / MODEL_FILE, artifact.quantization)
        progress.advance()
        return differences

    def _answers(self, file: Path, quantization: Quantization) -> dict[str, A]:
        return {name: self.run(file, entries, optimise) for name, (entries, optimise) in quantization.ways().items()}

    def _between(self, name: str, wanted: A, found: dict[str, A]) -> tuple[Difference, ...]:
        return tuple(
            difference
            for other, answers in found.items()
            for difference in self.differences((name, other), wanted, answers)
        )


class NetworkParity(OnnxParity[T, A]):
    """Of a network whose sums can be taken exactly, and whose layers can be held to these one by one."""

    @abstractmethod
    def given(self) -> tuple[Tensor, ...]:
        """The inputs of the network."""

    @abstractmethod
    def read(self, outputs: Sequence[Tensor]) -> A:
        """What a network answered."""

    @torch.no_grad()
    def measure_network(
        self,
        network: Network,
        stored: Network,
        file: Path,
        quantization: Quantization,
        bound: float,
        share: float | None = None,
    ) -> tuple[Parity, Difference]:
        """Run the inputs through `stored`, whose sums are exact (`IntegerRun`), and through `file`, and hold `network`
        to it layer by layer (`roundings`).

        Args:
            network: calibrated or trained, in evaluation mode.
            stored: what was made of it for the file.
            bound: see `measure`.
            share: where given, ONNX Runtime may also answer beyond `bound`, if it is at most so much further from the
                network that does not round than `network` is; see `measure`.

        Returns:
            The artifact's record, and how far the layers of `network` are from it.

        Raises:
            InputError: a bound is exceeded, or there is NaN.
        """
        inputs = self.given()
        reference = IntegerRun(stored)
        wanted = self.read(reference.run(*inputs))
        held = roundings(network, reference.codes, inputs)
        floating = None
        if share is not None:
            set_mode(network.module, "off")
            floating = self.read(network(*inputs))
            set_mode(network.module, "on")
        return self.measure(wanted, file, quantization, bound, floating, share or 0.0), held
