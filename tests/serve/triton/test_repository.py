"""Model repositories that are written: Triton server's own schema reads them, and a server runs one as it stands."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from penjing.core.artifact.onnx_classifier import normalised, open_classifier_artifact
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError
from penjing.core.runtime import onnx_runtime
from penjing.serve.engine.config import BatchConfig
from penjing.serve.families import classifier
from penjing.serve.supervisor.export import export_repository
from penjing.serve.triton.batch_adapter import LEFT_SECONDS, BatchAdapter
from penjing.serve.triton.settings import read_settings
from tests.serve.triton.classifiers import classifier_artifact, pixels
from tests.serve.triton.serving import wait_until
from tests.serve.triton.stand_in import Module, Sender


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_artifact(tmp_path_factory.mktemp("repository"))


def read(folder: Path) -> Any:
    messages: Any = model_config_pb2
    return text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())


def test_onnxruntime_form(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["max_batch_size=32", "preferred_batch_sizes=[8, 16]", "max_queue_delay=0.002", "max_queue_size=7"]
    flags = [word for each in [*settings, "queue_timeout=1.5", "threads=3"] for word in ("--set", each)]
    assert _run(["export", str(artifact), str(tmp_path / "models"), "--to", "model-repository", *flags]) == 0
    assert "cannot set" in capsys.readouterr().err  # the option that the artifact asks for
    folder = tmp_path / "models" / "classifier"
    config = read(folder)
    assert (config.name, config.backend, config.max_batch_size) == ("classifier", "onnxruntime", 32)
    assert [(each.name, list(each.dims), each.optional) for each in config.input] == [("images", [1, 12, 12], False)]
    assert [(each.name, list(each.dims)) for each in config.output] == [("logits", [10])]
    assert (folder / config.output[0].label_filename).read_text().split() == [str(index) for index in range(10)]
    batching = config.dynamic_batching
    assert list(batching.preferred_batch_size) == [8, 16]
    assert batching.max_queue_delay_microseconds == 2000
    policy = batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (7, 1_500_000)
    assert policy.allow_timeout_override
    assert config.parameters["intra_op_thread_count"].string_value == "3"
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [(each.name, each.shape[1:]) for each in session.get_inputs()] == [("images", [1, 12, 12])]


def test_python_form_holds_all_it_needs(artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded as the server does it, after the artifact that it was made of is gone from the environment."""
    monkeypatch.delenv("PENJING_MODEL", raising=False)
    out = export_repository(artifact, tmp_path / "models", "python", overrides=["threads=1", "max_batch_size=4"])
    config = read(out)
    assert {each.name: (each.data_type, each.optional) for each in config.input} == {
        "images": (config.input[0].data_type, True),
        "pixels": (config.input[1].data_type, True),
    }
    assert not config.dynamic_batching.HasField("default_queue_policy")  # with one the last of a burst wait for seconds
    parameters = {key: {"string_value": value.string_value} for key, value in config.parameters.items()}
    arguments = {"model_config": json.dumps({"parameters": parameters}), "model_repository": str(out)}
    adapter = BatchAdapter(arguments, Module())
    images = pixels(3)
    good, also = (
        Request(pixels=images[:2]),
        Request(images=normalised(images[2:], open_classifier_artifact(artifact).config)),
    )
    bad = Request(pixels=images[:0])
    first, refused, second = answers(adapter, [good, bad, also])
    expected = open_classifier_artifact(artifact)
    logits = expected.logits(expected.session(1), images)
    assert np.array_equal(np.concatenate([first.tensors["logits"], second.tensors["logits"]]), logits)
    assert refused.error.code == "invalid"
    assert "N ≥ 1" in str(refused.error)

    def late(_: Any, begun: Callable[[], None]) -> Callable[[], Any]:
        begun()
        return lambda: 1 / 0

    for fails in (lambda *_: 1 / 0, late):
        monkeypatch.setattr(adapter._model, "start", fails)
        failed = answers(adapter, [Request(pixels=images), Request(pixels=images[:0]), Request(pixels=images)])
        assert [answer.error.code for answer in failed] == ["internal", "invalid", "internal"]
    assert not adapter._life._running
    adapter.finalize()


class Gate:
    """Lets parts of batches through one by one, and says how many rows each had."""

    def __init__(self) -> None:
        self._run, self._go, self.rows = onnx_runtime.run_session, threading.Semaphore(0), list[int]()

    def __call__(self, session: Any, images: Any) -> Any:
        self.rows.append(len(images))
        assert self._go.acquire(timeout=60)
        return self._run(session, images)

    def release(self, count: int) -> None:
        self._go.release(count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(classifier, "run_session", made)
    return made


def gated_adapter(artifact: Path, gate: Gate, **settings: Any) -> BatchAdapter:
    """On one thread; nothing runs before `gate` says so, but for the warm-up."""
    gate.release(1)
    parameters = {"model": str(artifact), "engine": json.dumps({"threads": 1} | settings)}
    values = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    adapter = BatchAdapter({"model_config": json.dumps(values)}, Module())
    gate.rows.clear()
    return adapter


def test_batches_are_gathered_while_one_runs_and_nothing_waits_for_them(artifact: Path, gate: Gate) -> None:
    adapter = gated_adapter(artifact, gate, max_batch_size=4)
    first = Request(pixels=pixels(1))
    adapter.execute([first])
    wait_until(lambda: gate.rows == [1], 10, "the first batch")
    later = [Request(pixels=pixels(rows)) for rows in (2, 1, 1, 3, 2)]
    adapter.execute(later[:3])  # returns at once
    adapter.execute(later[3:])
    gate.release(5)
    assert all(request.sender.done.wait(10) for request in (first, *later))
    adapter.finalize()
    sizes = [len(request.sender.responses[0].tensors["logits"]) for request in (first, *later)]
    assert sizes == [1, 2, 1, 1, 3, 2]
    assert sum(gate.rows) == 10
    assert max(gate.rows) <= 4
    assert len(gate.rows) <= 5


def test_a_full_queue_refuses_at_once_and_what_waits_too_long_is_not_computed(artifact: Path, gate: Gate) -> None:
    adapter = gated_adapter(artifact, gate, max_batch_size=1, max_queue_size=3, queue_timeout=60)
    running = [Request(pixels=pixels(1)) for _ in range(2)]
    for count, request in enumerate(running, 1):  # one runs, one stands behind it
        adapter.execute([request])
        wait_until(lambda: len(adapter._waiting) == 0, 10, f"batch {count}")
    late, good, also, refused = (Request(pixels=pixels(1), microseconds=us) for us in (1, 0, 10**9, 0))
    adapter.execute([late, good, also, refused])
    assert refused.sender.done.wait(10)
    assert late.sender.done.wait(10)  # although the batch before it still runs
    assert not running[0].sender.done.is_set()
    assert (refused.sender.error().code, str(refused.sender.error())) == (
        "unavailable", "RESOURCE_EXHAUSTED: the queue is full: 3 requests wait; retry in 1 s",
    )  # fmt: skip
    gate.release(4)
    everyone = [*running, late, good, also]
    assert all(request.sender.done.wait(10) for request in everyone)
    adapter.finalize()
    assert "timeout expired" in str(late.sender.error())
    assert late.sender.error().code == "unavailable"
    assert [len(request.sender.responses[0].tensors["logits"]) for request in (*running, good, also)] == [1] * 4
    assert gate.rows == [1] * 4
    assert adapter._life._unanswered == 0
    assert not adapter._life._running


def test_nothing_is_computed_for_clients_that_left_while_they_waited(
    artifact: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = gated_adapter(artifact, gate, max_batch_size=2)
    running = [Request(pixels=pixels(2)) for _ in range(2)]
    for count, request in enumerate(running, 1):  # one runs, one stands behind it
        adapter.execute([request])
        wait_until(lambda: len(adapter._waiting) == 0, 10, f"batch {count}")
    gone, stays, goes_too = (Request(pixels=pixels(1)) for _ in range(3))
    adapter.execute([gone, stays, goes_too])
    for request in (gone, goes_too):
        request.sender.cancelled = True
    time.sleep(LEFT_SECONDS)
    gate.release(3)
    everyone = [*running, gone, stays, goes_too]
    assert all(request.sender.done.wait(10) for request in everyone)
    assert [request.sender.error().code for request in (gone, goes_too)] == ["cancelled"] * 2
    assert sum(gate.rows) == 5, "the one that stayed, in a batch of its own"

    def asked() -> bool:
        raise AssertionError("who has hardly waited is not asked for")

    quick = Request(pixels=pixels(1))
    monkeypatch.setattr(quick.sender, "is_cancelled", asked)
    adapter.execute([quick])
    gate.release(1)
    assert quick.sender.done.wait(10)
    adapter.finalize()
    assert adapter._life._unanswered == 0


def test_what_was_taken_over_is_answered_before_the_end(artifact: Path, gate: Gate) -> None:
    adapter = gated_adapter(artifact, gate, max_batch_size=2)
    requests = [Request(pixels=pixels(2)) for _ in range(4)]
    adapter.execute(requests)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(adapter.finalize)
        assert not requests[0].sender.done.is_set()
        gate.release(4)
        end.result(timeout=10)
    assert all(request.sender.done.is_set() for request in requests)


def test_a_decoders_repository(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = export_repository(tiny_checkpoint, tmp_path / "models", overrides=["num_blocks=64"])
    config = read(out)
    assert (out.name, config.backend, config.model_transaction_policy.decoupled) == ("llm", "python", True)
    assert (out / config.parameters["model"].string_value / "model.safetensors").is_file()
    assert json.loads(config.parameters["engine"].string_value) == {"num_blocks": 64}
    with pytest.raises(ConfigError, match="--form"):
        export_repository(tiny_checkpoint, tmp_path / "other", "onnxruntime")
    assert not (tmp_path / "other").exists()


def test_what_is_refused_leaves_nothing(artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    with pytest.raises(ConfigError, match="unknown key 'device'"):
        export_repository(artifact, out, overrides=["device=cuda"])
    with pytest.raises(ConfigError, match="preferred_batch_sizes has 128, more than max_batch_size=64"):
        export_repository(artifact, out, overrides=["preferred_batch_sizes=[128]"])
    with pytest.raises(InputError):
        export_repository(tmp_path / "nowhere", out)
    assert not out.exists()
    out.mkdir()
    (out / "precious").touch()
    for force in (False, True):
        with pytest.raises(InputError):
            export_repository(artifact, out, force=force)
    assert [path.name for path in out.iterdir()] == ["precious"]
    assert export_repository(artifact, tmp_path / "mine") == export_repository(artifact, tmp_path / "mine", force=True)


def test_a_damaged_artifact_is_refused(artifact: Path, tmp_path: Path) -> None:
    copy = export_repository(artifact, tmp_path / "models", "python") / "1" / "artifact"
    (copy / "model.onnx").write_bytes((copy / "model.onnx").read_bytes()[:-9])
    with pytest.raises(InputError, match="SHA-256"):
        export_repository(copy, tmp_path / "other")
    with pytest.raises(InputError, match="SHA-256"):
        BatchAdapter({"model_config": json.dumps({"parameters": {"model": {"string_value": str(copy)}}})}, Module())


@pytest.mark.parametrize("escaped", [False, True])
def test_folders_with_any_letters(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, escaped: bool
) -> None:
    """As the Python inside Triton server sees them, whose file names are ASCII with escapes."""
    folder = tmp_path / "größe 盆景"
    folder.symlink_to(artifact, target_is_directory=True)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    name = str(folder).encode().decode("ascii", "surrogateescape") if escaped else str(folder)
    found, _ = read_settings({"model_config": json.dumps({"parameters": {"model": {"string_value": name}}})})
    assert str(found).isascii()
    assert open_classifier_artifact(found).manifest == open_classifier_artifact(artifact).manifest
    gone = {"model": {"string_value": name + "x"}}
    with pytest.raises(InputError, match="cannot be opened") as error:
        read_settings({"model_config": json.dumps({"parameters": gone})})
    assert str(error.value).isascii()


def test_the_checkpoint_of_a_classifier_is_not_served_but_what_to_do_is_said(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="penjing compress quantize"):
        export_repository(artifact.parent / "fp32", tmp_path / "models")


@pytest.mark.parametrize("values", [{"max_batch_size": 0}, {"queue_timeout": 0}, {"max_queue_delay": -1}])
def test_settings_have_ranges(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        BatchConfig(**values)


def answers(adapter: BatchAdapter, requests: list[Request]) -> list[Any]:
    adapter.execute(requests)
    assert all(request.sender.done.wait(10) for request in requests)
    assert all(request.sender.finals == len(request.sender.responses) == 1 for request in requests)
    return [request.sender.responses[0] for request in requests]


class Request:
    def __init__(self, microseconds: int = 0, name: str = "", **tensors: np.ndarray) -> None:
        self._tensors, self.microseconds, self._name = tensors, microseconds, name
        self.sender = Sender()

    def get_response_sender(self) -> Sender:
        return self.sender

    def timeout(self) -> int:
        return self.microseconds

    def request_id(self) -> str:
        return self._name

    def parameters(self) -> str:
        return ""

    def inputs(self) -> list[Any]:
        return [_Tensor(name, array) for name, array in self._tensors.items()]


class _Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array
