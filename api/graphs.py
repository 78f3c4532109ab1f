"""`penjing.Network`: any network as a graph in memory, made smaller by the steps that recipes are made of."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from penjing.arguments import Sections, StrPath, as_path, as_sections
from penjing.batches import Data, check_inputs, gathered, lesson
from penjing.core.artifact.base import MODEL_FILE, REPORT_FILE
from penjing.core.artifact.onnx_graph import open_graph_artifact, run_graph
from penjing.core.checkpoint.graph import load_network, parameters_of, save_graph
from penjing.core.errors import ConfigError, PenjingError
from penjing.core.files import atomic_write_bytes, publish_folder
from penjing.core.graph import network as graph
from penjing.core.graph.config import GraphConfig, Meaning, Pixels
from penjing.core.progress import Progress

RATE = 3e-4
"""Peak of a distill's learning rate: that of recipes/graph-int8.toml, for a network that has learnt already."""
SAMPLES_FILE = "samples.safetensors"
UNGUARDED = {"accuracy_points": 100.0, "similarity_loss": 2.0, "retries": 0}
"""A step by itself may cost what it likes: the caller heals the network, or looks at `report`."""


class Network:
    """A network of any kind: operators, weights, named inputs and outputs.

    `from_torch`, `from_onnx` and `load` make one. Each step runs as a recipe of one step does, with its checks and its
    measurements, in a folder for the moment.
    """

    def __init__(self, network: graph.Network, report: Sequence[str] = ()) -> None:
        self._network, self._said = network, tuple(report)

    @classmethod
    def from_torch(
        cls,
        model: nn.Module,
        example_inputs: Sequence[Any] | Tensor,
        *,
        dynamic: Mapping[str, Mapping[int, str]] | None = None,
        meaning: Meaning = "tensors",
        labels: Sequence[str] = (),
        pixels: Pixels | None = None,
        tokenizer: StrPath | None = None,
    ) -> Network:
        """The network that `model` computes in evaluation mode, with weights of its own.

        Args:
            example_inputs: tensors that show it, in order; a single one may stand alone.
            dynamic: input → axis → name of what may differ from call to call; {"x": {0: "batch"}} for every input, if
                left out.
            meaning: of the first output: "classes", "embedding", or "tensors".
            labels: name of each class.
            pixels: how images become the first input.
            tokenizer: a tokenizer.json or its folder, by which texts of `data` become the inputs.

        Raises:
            InputError: it cannot be exported, or uses an operator that penjing does not know; says which.
        """
        from penjing.core.graph.trace import trace

        example = tuple(example_inputs) if isinstance(example_inputs, Sequence) else (example_inputs,)
        found = trace(model, example, {}, dynamic, meaning=meaning, labels=labels, pixels=pixels)
        return cls(_with_tokenizer(found.copy(), tokenizer))

    @classmethod
    def from_onnx(
        cls,
        path: StrPath,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        dynamic: Mapping[str, Mapping[int, str]] | None = None,
        meaning: Meaning = "tensors",
        labels: Sequence[str] = (),
        pixels: Pixels | None = None,
        tolerance: float | None = None,
        tokenizer: StrPath | None = None,
    ) -> Network:
        """The network of an ONNX file, whose answers were compared with those of ONNX Runtime.

        Args:
            shapes: sizes of the example, by input; needed where the file leaves them open.
            dynamic, meaning, labels, pixels, tokenizer: see `from_torch`.
            tolerance: a share of the answers' scale, beyond 1e-5.

        Raises:
            InputError: damaged, or it holds what penjing cannot compute; says which operator. Or its answers differ.
        """
        from penjing.core.onnx_reader.read import from_onnx

        said = {"meaning": meaning, "labels": labels, "pixels": pixels}
        found = from_onnx(as_path("path", path), shapes=shapes, dynamic=dynamic, tolerance=tolerance, **said)  # type: ignore[arg-type]
        return cls(_with_tokenizer(found.network, tokenizer))

    @classmethod
    def load(cls, folder: StrPath) -> Network:
        """The network of a graph's checkpoint; every hash is checked.

        Raises:
            InputError: missing, damaged, or of another kind.
        """
        return cls(load_network(as_path("folder", folder)))

    @property
    def config(self) -> GraphConfig:
        """Inputs and outputs, and what they mean."""
        return self._network.config

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of `config.outputs`.

        Raises:
            InputError: inputs that are not those of `config`.
        """
        check_inputs(inputs, self.config)
        return self._network(*inputs)

    def module(self) -> fx.GraphModule:
        """The network's own module, with its weights: train it with any loop, and the network has learnt."""
        return self._network.module

    def text(self) -> str:
        """The operators, one a line, with shapes."""
        return self._network.text()

    def save(self, folder: StrPath, *, force: bool = False) -> Path:
        """Write a checkpoint folder, which every command reads; returns it.

        Raises:
            InputError: there is something else, or something older without `force`.
            SetupError: disk full, no permission.
        """
        with publish_folder(out := as_path("folder", folder), replace=force) as partial:
            save_graph(partial, self._network, {"command": "penjing.Network.save"})
        return out

    def export(self, path: StrPath) -> Path:
        """Write the network in floating point as an ONNX file; returns its path.

        Raises:
            InputError: an operator has no form in ONNX.
        """
        from penjing.compress.export.onnx_graph import export_network

        out = as_path("path", path)
        with TemporaryDirectory(prefix="penjing-") as scratch:
            export_network(self._network, Path(scratch) / MODEL_FILE, {})
            return _copy_file(Path(scratch) / MODEL_FILE, out)

    def report(self) -> str:
        """What each step gained and cost, a line each; of a network that none was done to, its size."""
        size = f"{parameters_of(self._network.module):,} parameters"
        return "\n".join(self._said) or size

    def prune(
        self,
        ratio: float | None = None,
        *,
        method: str = "l1",
        data: Data | None = None,
        sections: Sections | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Network:
        """A new network without the least of its units; this one stays as it is.

        Args:
            ratio: share of the units that leave; `target` in its place says what may stay.
            method: how units are scored: "l1", "l2", "taylor", "activation" or "random".
            data: samples, where the method looks at some; the network's example if left out.
            sections: further sections of the recipe of one step that runs, such as {"guard": {"similarity_loss": 0.1}}:
                without it, any loss is accepted.
            settings: further keys of the step, which `penjing recipe keys compress steps.prune` lists.

        Raises:
            PenjingError: as `penjing compress` says.
        """
        step = {"kind": "prune", "method": method, **({} if ratio is None else {"ratio": ratio}), **settings}
        with TemporaryDirectory(prefix="penjing-") as scratch:
            made, said = self._run(step, data, sections, Path(scratch), progress)
            return Network(load_network(made), [*self._said, f"prune: {said}"])

    def distill(
        self,
        teacher: Network,
        *,
        data: Data | None = None,
        epochs: float = 1.0,
        batch_size: int | None = None,
        sections: Sections | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> Network:
        """Teach this network, in place, to answer as `teacher` does; returns it.

        Args:
            data, sections: see `prune`. Of batches, as many samples are read as 2 GiB hold; the report says how many.
            epochs: how often each sample is seen; `steps`, the number of updates, goes before it.
            batch_size: samples of an update; those of the first batch that is given, or else 64.
            settings: further keys of the step, which `penjing recipe keys compress steps.distill` lists.

        Raises:
            ConfigError: no network, no samples, or a number that cannot be; how many samples a file or folder holds is
                not known here: give steps.
            PenjingError: as `penjing compress` says.
        """
        if not isinstance(teacher, Network):
            raise ConfigError(f"teacher is {type(teacher).__name__}; give a penjing.Network")
        if data is None and "data" not in as_sections(sections):
            raise ConfigError("distill learns from samples; give data, such as a DataLoader or a folder")
        data, plan = lesson(data, self.config, epochs, batch_size, settings.pop("steps", None))
        settings.setdefault("learning_rate", {"peak": RATE})
        with TemporaryDirectory(prefix="penjing-") as scratch:
            taught_by = str(teacher.save(Path(scratch) / "teacher"))
            step = {
                "kind": "distill",
                "teacher": taught_by,
                "batch_size": plan.batch_size,
                "steps": plan.steps,
                **settings,
            }
            made, _ = self._run(step, data, sections, Path(scratch), progress)
            learnt = load_network(made)
        seen = gathered(data, self.config) if isinstance(data, Mapping) else self._network.example
        inputs = [seen[spec.name] for spec in self.config.inputs]
        before, after = (_cosine(network(*inputs), teacher(*inputs)) for network in (self._network, learnt))
        of = f" of {plan.batch_size} from {plan.rows:,} samples" if plan.rows else ""
        line = f"distill: {plan.steps} updates{of}, cosine to the teacher {before:.4f} → {after:.4f}"
        self._network, self._said = learnt, (*self._said, line)
        return self

    def quantize(
        self,
        data: Data | None = None,
        *,
        target: str = "onnxruntime-cpu",
        sections: Sections | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> QuantizedNetwork:
        """The network in INT8 for an engine; this one stays as it is, and its report says what came of it.

        Args:
            data, sections: see `prune`.
            target: "onnxruntime-cpu", "onnxruntime-avx2" or "tensorrt".
            settings: further keys of the step, which `penjing recipe keys compress steps.quantize` lists.

        Raises:
            PenjingError: as `penjing compress` says.
        """
        scratch: TemporaryDirectory[str] = TemporaryDirectory(prefix="penjing-")
        step = {"kind": "quantize", "target": target, **settings}
        made, said = self._run(step, data, sections, Path(scratch.name), progress)
        self._said = (*self._said, f"quantize: {said}")
        return QuantizedNetwork(made, self._said, scratch)

    def _run(
        self,
        step: dict[str, Any],
        data: Data | None,
        sections: Sections | None,
        scratch: Path,
        progress: Progress | None,
    ) -> tuple[Path, str]:
        """The folder that a recipe of this step makes, and a line about it."""
        from penjing.compress.report.schema import read_report
        from penjing.compress.report.text import summary_line
        from penjing.compress.run import run_recipe

        given = as_sections(sections)
        values = {
            "model": str(self.save(scratch / "before")),
            "output": str(scratch / "after"),
            "steps": [step],
            **given,
        }
        values["guard"] = UNGUARDED | given.get("guard", {})
        if data is not None:
            source = self._source(data, scratch / SAMPLES_FILE)
            values["data"] = {"source": source, **given.get("data", {})}
        try:
            made = run_recipe(values, progress=progress, command=f"penjing.Network.{step['kind']}")
        except PenjingError as error:  # of files that the caller does not know
            said = str(error).replace(str(scratch / SAMPLES_FILE), "data").replace(values["model"], "the network")
            error.args = (said, *error.args[1:])
            raise
        return made, summary_line(read_report(made))

    def _source(self, data: Data, path: Path) -> str:
        """`data` as a recipe names it: batches are written to `path`."""
        if isinstance(data, str | os.PathLike):
            return os.fspath(data)
        save_file(gathered(data, self.config), path)
        return str(path)


class QuantizedNetwork:
    """A network in INT8: what `penjing compress` makes, in a folder that lasts as long as this object.

    Attributes:
        folder: the artifact; `save` keeps it.
    """

    def __init__(
        self, folder: Path, report: Sequence[str] = (), scratch: TemporaryDirectory[str] | None = None
    ) -> None:
        self.folder, self._said, self._scratch = folder, tuple(report), scratch
        self._artifact = open_graph_artifact(folder)
        self._session = self._artifact.session()

    @classmethod
    def load(cls, folder: StrPath) -> QuantizedNetwork:
        """The artifact in `folder`; every hash is checked.

        Raises:
            InputError: missing, damaged, or of another kind.
        """
        return cls(as_path("folder", folder))

    @property
    def config(self) -> GraphConfig:
        """Inputs and outputs, and what they mean."""
        return self._artifact.config

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of `config.outputs`, by ONNX Runtime on the CPU.

        Raises:
            InputError: inputs that are not those of `config`.
        """
        check_inputs(inputs, self.config)
        given = {
            spec.name: value.detach().cpu().numpy() for spec, value in zip(self.config.inputs, inputs, strict=True)
        }
        found = run_graph(self._session, self.config, given)
        return tuple(torch.from_numpy(found[spec.name]) for spec in self.config.outputs)

    def export(self, path: StrPath) -> Path:
        """Copy the ONNX file to `path`; returns it."""
        return _copy_file(self.folder / MODEL_FILE, as_path("path", path))

    def save(self, folder: StrPath, *, force: bool = False) -> Path:
        """Keep the artifact, with its report and parity record; returns `folder`, which `penjing serve` takes.

        Raises:
            InputError: there is something else, or something older without `force`.
            SetupError: disk full, no permission.
        """
        with publish_folder(out := as_path("folder", folder), replace=force) as partial:
            shutil.copytree(self.folder, partial, dirs_exist_ok=True)
        return out

    def report(self) -> str:
        """What each step gained and cost, a line each."""
        from penjing.compress.report.schema import read_report
        from penjing.compress.report.text import summary_line

        if self._said or not (self.folder / REPORT_FILE).exists():
            return "\n".join(self._said)
        return summary_line(read_report(self.folder))


def _with_tokenizer(network: graph.Network, path: StrPath | None) -> graph.Network:
    from penjing.core.imports.graph_tokenizer import with_tokenizer

    return network if path is None else with_tokenizer(network, as_path("tokenizer", path))


@torch.no_grad()
def _cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Of the first floating output, on average over axis 0."""
    one, other = next((a, b) for a, b in zip(first, second, strict=True) if a.is_floating_point())
    rows = len(one) if one.dim() > 1 else 1
    return float(nn.functional.cosine_similarity(one.reshape(rows, -1), other.reshape(rows, -1)).mean())


def _copy_file(source: Path, out: Path) -> Path:
    """Raises:
    SetupError: disk full, no permission.
    """
    atomic_write_bytes(out, source.read_bytes())
    return out
