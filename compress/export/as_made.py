"""ONNX files of networks as they are: an artifact's own, for the engine that it was quantized for, of text encoders and
graphs; and that of a graph in floating point."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.export.record import ExportRecord, Form, publish_file, source_of
from penjing.compress.parity.base import OnnxParity
from penjing.compress.quantize.targets import TargetName
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.artifact.onnx_graph import open_graph_session, run_graph
from penjing.core.artifact.parity import Difference
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError, InputError, runtime_says
from penjing.core.graph.compare import distance, gaps
from penjing.core.progress import Progress

FLOATING = 1e-3
"""How far the file of a graph in floating point may be from it, as a share of an output's scale: rounding of deep
networks moves answers by up to a tenth of that, a wrong operator by more."""


class AsMade:
    """Called with a folder, it writes the artifact's file to `out` after it passed the artifact's parity gate here."""

    def __init__(self, parity: type[OnnxParity[Any, Any]], *notes: str) -> None:
        """`notes`: what a user of the file must know."""
        self._parity = parity
        self._notes = notes

    def __call__(
        self, folder: Path, form: Form, out: Path, target: TargetName | None, _: bool, progress: Progress
    ) -> ExportRecord:
        """Export the artifact in `folder`.

        Args:
            target: None takes the artifact's own.

        Raises:
            ConfigError: the artifact is for another target.
            InputError: damaged, or beyond the parity bound.
        """
        artifact = self._parity.open(folder)
        quantization = artifact.quantization
        if target not in (None, quantization.target):
            raise ConfigError(
                f"--target {target}: {folder} was quantized for {quantization.target}, and {target} wants "
                f"other quantizers; make one with 'penjing compress {folder / 'recipe.toml'} "
                f"--set steps.0.target={target} --out …'"
            )
        progress.start("parity", 1)
        record = ExportRecord(
            form=form,
            target=quantization.target,
            **source_of(folder),
            session_options=quantization.session_options,
            differences=self._parity.compare(artifact, folder / MODEL_FILE, quantization),
            bound=artifact.parity.bound,
            unmeasured=artifact.parity.unmeasured,
            notes=self._notes,
        )
        progress.advance()
        publish_file(out, record, lambda partial: shutil.copyfile(folder / MODEL_FILE, partial))
        return record


def write_floating(folder: Path, out: Path, target: TargetName | None, progress: Progress) -> ExportRecord:
    """Write the graph in `folder`, in floating point, as an ONNX file whose answers to the network's own example are
    compared with the network's.

    Raises:
        ConfigError: a target, which integers have.
        InputError: damaged, an operator has no form in ONNX, or the file answers otherwise.
    """
    if target is not None:
        raise ConfigError(f"--target {target}: {folder} is in floating point, which has one form; leave it out")
    network = load_network(folder)
    progress.start("parity", 1)
    with TemporaryDirectory(prefix="penjing-") as scratch:
        file = Path(scratch) / MODEL_FILE
        export_network(network, file, {})
        session = open_graph_session(file, network.config, {}, threads=1, optimise=False)
        try:
            found = run_graph(session, network.config, {name: each.numpy() for name, each in network.example.items()})
        except Exception as error:  # the classes of ONNX Runtime share no base
            raise InputError(f"{folder}: ONNX Runtime does not run its file: {runtime_says(error)}") from None
        with torch.no_grad():
            answers = network(*network.inputs())
        differences = []
        for spec, expected in zip(network.config.outputs, answers, strict=True):
            answer = torch.from_numpy(found[spec.name])
            if (share := distance(answer, expected)) > FLOATING:
                raise InputError(
                    f"{folder}: {spec.name} of its file is {share:.1e} of its scale away in ONNX Runtime, more than "
                    f"{FLOATING:.0e}; please report this"
                )
            if not answer.numel():
                continue
            gap = gaps(answer, expected)
            differences.append(
                Difference(
                    between=("network", "onnxruntime_as_written"),
                    quantity=f"output {spec.name}",
                    num_values=gap.numel(),
                    largest=gap.max().item(),
                    mean=gap.mean().item(),
                )
            )
        progress.advance()
        record = ExportRecord(form="onnx", **source_of(folder), differences=tuple(differences))
        publish_file(out, record, lambda partial: shutil.copyfile(file, partial))
    return record
