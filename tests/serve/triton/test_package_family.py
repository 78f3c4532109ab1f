"""A family of a package outside penjing: found by its entry point, and served by a real Triton server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from penjing.core import family
from penjing.core.errors import InputError
from penjing.core.manifest import write_manifest
from penjing.serve.supervisor.export import export_repository
from tests.serve.triton.classifiers import serving_classifier

PACKAGE = '''"""What the serving stage can do with scalers: numbers times a factor."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penjing.core.manifest import verify
from penjing.serve.families.base import Signature, TensorSpec
from penjing.serve.families.batched import batched


@dataclass(frozen=True)
class Artifact:
    folder: Path
    factor: float


def open_artifact(folder):
    verify(folder)
    return Artifact(folder, json.loads((folder / "config.json").read_text())["factor"])


class Scaler:
    def __init__(self, folder, settings):
        self._factor = np.float32(open_artifact(folder).factor)

    def prepare(self, inputs):
        return inputs["numbers"]

    def start(self, requests, begun):
        begun()
        return lambda: [{"scaled": request * self._factor} for request in requests]

    def warm_up(self):
        self.start([np.zeros((1, 3), np.float32)], lambda: None)()


NUMBERS, SCALED = TensorSpec("numbers", "FP32", (3,)), TensorSpec("scaled", "FP32", (3,))
FAMILY = batched(
    name="scaler",
    open_artifact=open_artifact,
    signature=lambda artifact: Signature("scaler", (NUMBERS,), (NUMBERS,), (SCALED,)),
    load=Scaler,
    how_to_compress="the checkpoint of a scaler; there is no way to make an artifact of it",
)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, as an installation makes one; it is on the path of this process and of its children."""
    folder = tmp_path / "packages"
    (folder / "scaling").mkdir(parents=True)
    (folder / "scaling" / "serve.py").write_text(PACKAGE)
    facts = folder / "scaling-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: scaling\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[penjing.families]\nscaler = scaling\n")
    inherited = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([inherited] if inherited else [])]))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(family, "_packages", family._packages.__wrapped__)
    return folder


@pytest.fixture
def artifact(package: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "thrice"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"penjing_family": "scaler", "factor": 3.0}))
    write_manifest(folder, "artifact", {})
    return folder


@pytest.mark.server
@pytest.mark.xdist_group("triton")
def test_it_is_served_from_its_package(artifact: Path) -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = triton.InferInput("numbers", [2, 3], "FP32").set_data_from_numpy(numbers)
    with serving_classifier(artifact, max_batch_size=4) as served, served.client(model="scaler") as client:
        assert client.is_ready()
        with triton.InferenceServerClient(served.address) as plain:
            answer = plain.infer("scaler", [tensor])
    assert answer is not None
    scaled = answer.as_numpy("scaled")
    assert scaled is not None
    assert np.array_equal(scaled, 3 * numbers)


def test_it_is_exported_and_its_checkpoint_is_refused_in_its_own_words(artifact: Path, tmp_path: Path) -> None:
    made = export_repository(artifact, tmp_path / "models", "python")
    assert made.name == "scaler"
    assert "numbers" in (made / "config.pbtxt").read_text()
    (artifact / "penjing.json").unlink()
    with pytest.raises(InputError, match="thrice is the checkpoint of a scaler"):
        export_repository(artifact, tmp_path / "other", "python")
