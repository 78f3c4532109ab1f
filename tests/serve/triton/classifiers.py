"""A small INT8 classifier and a server with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.core.files import publish_folder
from penjing.serve.supervisor.process import ServeConfig
from tests.compress.quantize.folders import image_data, image_set, vision_folder
from tests.compress.quantize.networks import basic, random_resnet
from tests.serve.triton.serving import Served, free_ports


def classifier_artifact(folder: Path, seed: int = 0, parity_bound: float = 10.0) -> Path:
    """For 12 × 12 grey images in ten classes, with random weights."""
    source = vision_folder(folder / "fp32", random_resnet(basic(), seed))
    with publish_folder(folder / "int8") as partial:
        quantize_checkpoint(source, partial, ArtifactSettings(parity_bound=parity_bound), image_data(16))
    return folder / "int8"


def pixels(count: int, seed: int = 5) -> np.ndarray:
    """(count, 1, 12, 12) uint8."""
    return image_set(count, seed=seed).images


class ServedClassifier(Served):
    """As `Served`, with settings of a batched model, and the front that `front` asks for."""

    def __init__(self, model: Path, front: dict[str, Any] | None = None, **settings: Any) -> None:
        grpc_port, http_port, metrics_port, front_port = free_ports(4)
        ports = {"grpc_port": grpc_port, "http_port": http_port, "metrics_port": metrics_port}
        self.config = ServeConfig.model_validate(ports | {"front": front and {"port": front_port} | front})
        self.address = f"127.0.0.1:{grpc_port}"
        command = [sys.executable, "-m", "penjing.serve.supervisor.supervisor", str(model)]
        self.process = subprocess.Popen(
            [*command, self.config.model_dump_json(), json.dumps(settings)], stderr=subprocess.PIPE, text=True
        )

    def metrics(self) -> dict[str, float]:
        """Triton server's own figures of the model, by name without the prefix."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.config.metrics_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return {
            name: float(value)
            for name, value in re.findall(r'^nv_(\w+)\{model="classifier",version="1"\} (\S+)$', text, re.MULTILINE)
        }

    def shown(self, name: str) -> float:
        """One of penjing's own figures, by name with labels and without the prefix."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.config.metrics_port}/metrics", timeout=5) as answer:
            lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        return float(lines.get(f"penjing:{name}", 0.0))

    def arrived(self) -> float:
        """Requests that wait or were answered since the server started; one that runs is not among them. It never
        falls, so that a test which waits for it cannot look too late."""
        found = self.metrics()
        return found["inference_pending_request_count"] + found["inference_request_success"]


@contextmanager
def serving_classifier(model: Path, **settings: Any) -> Iterator[ServedClassifier]:
    """A ready server, ended at the end."""
    served = ServedClassifier(model, **settings)
    try:
        served.wait_ready()
        yield served
    finally:
        served.end()
