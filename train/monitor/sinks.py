"""Where records go: JSON lines, TensorBoard, a Prometheus endpoint. A record is one flat dictionary with a "step"."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from penjing.core.errors import SetupError
from penjing.core.files import atomic_write_text, writing

Record = dict[str, Any]
_WANDB_ID, _MLFLOW_ID = "wandb-id.txt", "mlflow-id.txt"  # in the run's folder


class Sink(Protocol):
    """Takes records; `close` flushes."""

    def write(self, record: Record) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """No more records come."""
        ...


def drop_later(path: Path, last_step: int) -> None:
    """Drop from JSON lines those of steps after `last_step`, which a run does again, and one that a killed process was
    writing. A file that is not there becomes empty."""
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").split("\n"):  # answers keep other separators, such as U+2028
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("step", 0) <= last_step:
                kept.append(line)
    atomic_write_text(path, "".join(f"{line}\n" for line in kept))


class JsonLines:
    """One JSON object a line in `path`, flushed each time. Lines of steps that a resumed run does again are dropped
    first."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self.path = path
        drop_later(path, first_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 closed by close()

    def write(self, record: Record) -> None:
        """Append one line."""
        with writing(self.path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self.path):
            self._file.close()


class TensorBoard:
    """Scalars for TensorBoard, under train/ and eval/.

    Raises:
        SetupError: the package `tensorboard` is not installed; from every method: disk full, no permission.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SetupError(
                "monitor.tensorboard = true needs the package tensorboard: pip install 'penjing[train]', or set it "
                "to false"
            ) from error
        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, record: Record) -> None:
        """Write each number of the record."""
        with writing(self._folder):  # what its thread met earlier is raised here, or at the end
            for name, value in record.items():
                if isinstance(value, int | float) and name != "step":
                    self._writer.add_scalar(name if "/" in name else f"train/{name}", value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        with writing(self._folder):
            self._writer.close()


class WeightsAndBiases:
    """Records as a run of a project of Weights & Biases; where it goes is told by its own WANDB_ variables.

    Raises:
        SetupError: the package `wandb` is not installed.
    """

    def __init__(self, project: str, folder: Path, first_step: int = 0) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise SetupError(
                f"monitor.wandb = {project!r} needs the package wandb: pip install wandb, or leave it out"
            ) from error
        known = _known_id(folder / _WANDB_ID, first_step)
        with writing(folder):
            self._run = wandb.init(project=project, dir=str(folder), name=folder.name, id=known, resume="allow")
        atomic_write_text(folder / _WANDB_ID, f"{self._run.id}\n")

    def write(self, record: Record) -> None:
        """Log each number of the record."""
        self._run.log(_numbers(record), step=record["step"])

    def close(self) -> None:
        """Tell that the run has ended."""
        self._run.finish()


class MLflow:
    """Records as a run of an experiment of MLflow; where it goes is told by MLFLOW_TRACKING_URI.

    Raises:
        SetupError: the package `mlflow` is not installed.
    """

    def __init__(self, experiment: str, folder: Path, first_step: int = 0) -> None:
        try:
            import mlflow  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise SetupError(
                f"monitor.mlflow = {experiment!r} needs the package mlflow: pip install mlflow, or leave it out"
            ) from error
        self._mlflow = mlflow
        mlflow.set_experiment(experiment)
        started = mlflow.start_run(_known_id(folder / _MLFLOW_ID, first_step), run_name=folder.name)
        atomic_write_text(folder / _MLFLOW_ID, f"{started.info.run_id}\n")

    def write(self, record: Record) -> None:
        """Log each number of the record."""
        self._mlflow.log_metrics(_numbers(record), step=record["step"])

    def close(self) -> None:
        """Tell that the run has ended."""
        self._mlflow.end_run()


def _known_id(path: Path, first_step: int) -> str | None:
    """What a tracker calls a run that goes on from `first_step`; None for one that begins, also in a folder that was
    used before."""
    return path.read_text(encoding="utf-8").strip() if first_step and path.exists() else None


def _numbers(record: Record) -> dict[str, float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}


class Prometheus:
    """The newest record as gauges on http://127.0.0.1:`port`/metrics.

    Raises:
        SetupError: the port is in use.
    """

    def __init__(self, port: int) -> None:
        self._text = ""
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = sink._text.encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise SetupError(f"monitor.prometheus_port = {port}: {error.strerror}; choose another port") from error
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        """Replace the gauges. A record may call its numbers by domains, which may be called anything: where a name
        cannot be a gauge's, or two would be the same, it is a label."""
        gauges = dict[str, list[str]]()
        for name, value in record.items():
            if isinstance(value, int | float):
                spelled = name.replace("/", "_").replace(".", "_")
                valid = re.sub(r"[^a-zA-Z0-9_:]", "_", spelled)
                found = gauges.setdefault(f"penjing_train_{valid}", [])
                found.append(f"{_label(name) if found or valid != spelled else ''} {value}")
        lines = list[str]()
        for gauge, found in gauges.items():
            lines += [f"# TYPE {gauge} gauge", *(f"{gauge}{each}" for each in found)]
        self._text = "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _label(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{name="{escaped}"}}'
