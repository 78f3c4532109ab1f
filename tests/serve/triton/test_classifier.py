"""A real Triton server with a small INT8 classifier: answers, batches, bad requests, limits, death and drain."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from penjing.core.artifact.onnx_classifier import ClassifierArtifact, normalised, open_classifier_artifact
from penjing.core.cli import _run
from penjing.core.errors import InputError, OverloadedError, PenjingError, RequestError, ServerError, UnavailableError
from penjing.serve.bench.batched import bench_batched
from penjing.serve.client.client import AsyncClient
from penjing.serve.client.wire_tensors import build_infer
from penjing.serve.parity import served_parity
from tests.serve.triton.classifiers import ServedClassifier, classifier_artifact, pixels, serving_classifier
from tests.serve.triton.serving import leftovers, wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]
MAX_BATCH_SIZE = 1024  # images of a request that takes about 0.1 s
QUEUE = 16


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> ClassifierArtifact:
    return open_classifier_artifact(classifier_artifact(tmp_path_factory.mktemp("classifier")))


@pytest.fixture(scope="module")
def served(artifact: ClassifierArtifact) -> Iterator[ServedClassifier]:
    with serving_classifier(artifact.folder, max_batch_size=MAX_BATCH_SIZE, max_queue_size=QUEUE, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def local(artifact: ClassifierArtifact) -> Any:
    """ONNX Runtime in this process."""
    return artifact.session(threads=1)


def test_answers_are_local_onnx_runtimes_bit_for_bit(
    served: ServedClassifier, artifact: ClassifierArtifact, local: Any
) -> None:
    images = pixels(48)
    expected = artifact.logits(local, images)
    with served.client() as client:
        result = client.classify(images)
        assert np.array_equal(result.logits, expected)
        assert np.array_equal(result.classes, expected.argmax(1))
        floats = normalised(images, artifact.config)
        assert np.array_equal(client.classify(floats).logits, expected)
        assert np.array_equal(client.classify(floats[7:8].astype(np.float64)).logits, expected[7:8])


def test_requests_that_come_together_run_together_and_do_not_touch_each_other(
    served: ServedClassifier, artifact: ClassifierArtifact, local: Any
) -> None:
    """Both kinds of input, one to five images a request, every ninth request bad; the first wait behind large ones."""
    images = pixels(130)
    expected = artifact.logits(local, images)
    broken = normalised(images[:1], artifact.config)
    broken[0, 0, 5, 5] = np.nan
    before = served.metrics()

    def ask(index: int) -> bool:
        part = slice(index, index + 1 + index % 5)
        if index % 9 == 0:
            with pytest.raises(RequestError, match=r"images\[0\] holds NaN or infinity"):
                client.classify(broken)
            return True
        given = images[part] if index % 2 else normalised(images[part], artifact.config)
        return np.array_equal(client.classify(given).logits, expected[part])

    with served.client() as client, ThreadPoolExecutor(12) as pool:
        large = [pool.submit(client.classify, pixels(MAX_BATCH_SIZE)) for _ in range(4)]
        assert all(pool.map(ask, range(120)))
        assert all(one.result().logits.shape == (MAX_BATCH_SIZE, 10) for one in large)
    after = served.metrics()
    assert after["inference_exec_count"] - before["inference_exec_count"] < 124


def test_asyncio_client(served: ServedClassifier, artifact: ClassifierArtifact, local: Any) -> None:
    images = pixels(12)

    async def ask() -> list[np.ndarray]:
        async with AsyncClient(served.address, retries=0, timeout=30) as client:
            assert await client.is_ready()
            with pytest.raises(RequestError, match="unexpected shape"):
                await client.classify(images[:, :, :11])
            answers = await asyncio.gather(*(client.classify(images[i : i + 1]) for i in range(12)))
        return [answer.logits for answer in answers]

    assert np.array_equal(np.concatenate(asyncio.run(ask())), artifact.logits(local, images))


def test_nvidias_client_and_its_labels(served: ServedClassifier, artifact: ClassifierArtifact, local: Any) -> None:
    images = pixels(3)
    expected = artifact.logits(local, images)
    with triton.InferenceServerClient(served.address) as client:
        outputs = [triton.InferRequestedOutput("logits", class_count=1)]
        found = _logits(client.infer("classifier", [_tensor("pixels", images)], outputs=outputs))
        answer = _logits(client.infer("classifier", [_tensor("images", normalised(images, artifact.config))]))
    assert np.array_equal(answer, expected)
    named = [entry.decode().split(":")[1:] for entry in found.reshape(-1)]
    assert named == [[str(index), artifact.config.labels[index]] for index in expected.argmax(1)]


def test_parity_through_the_endpoint_is_recorded_and_another_model_is_refused(
    served: ServedClassifier, artifact: ClassifierArtifact, tmp_path: Path
) -> None:
    out = tmp_path / "verified.json"
    command = ["compress", "verify", str(artifact.folder), "--server", served.address, "--json", str(out)]
    assert _run(command) == 0
    found = json.loads(out.read_text())
    assert found["same_bits"] is True
    by_name = {tuple(each["between"]): each for each in found["differences"]}
    assert by_name["onnxruntime", "served_endpoint"]["largest"] == 0
    assert by_name["fake_quantized", "served_endpoint"] == by_name["fake_quantized", "onnxruntime"] | {
        "between": ["fake_quantized", "served_endpoint"]
    }
    record = json.loads((artifact.folder / "parity_served_endpoint.json").read_text())
    assert record["outputs"] == {"served_endpoint": artifact.parity.outputs["onnxruntime"]}
    reopened = open_classifier_artifact(artifact.folder).parity
    assert reopened.outputs == artifact.parity.outputs | record["outputs"]
    assert reopened.differences[: len(artifact.parity.differences)] == artifact.parity.differences
    other = classifier_artifact(tmp_path, seed=1, parity_bound=2.0)
    with pytest.raises(InputError, match="does it serve"):
        served_parity(other, served.address)
    with pytest.raises(ServerError, match="does it serve"):
        bench_batched(other, served.address)


def test_bench(served: ServedClassifier, artifact: ClassifierArtifact) -> None:
    found = bench_batched(artifact.folder, served.address, runs=2, images=256, threads=1)
    speeds = found["images_per_second"]
    assert set(speeds) == {"onnxruntime", "server_floats", "server_pixels"}
    assert found["share"]["server_pixels"] == speeds["server_pixels"] / speeds["onnxruntime"] > 0
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p99"]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 1, 11, 12), np.uint8), r"unexpected shape for input 'pixels'.*Expected \[-1,1,12,12\]"),
        (np.zeros((2, 3, 12, 12), np.float32), "unexpected shape for input 'images'"),
        (np.zeros((1, 12, 12), np.float32), r"shape \(N, C, H, W\)"),
        (np.zeros((0, 1, 12, 12), np.uint8), "N ≥ 1"),
        (np.zeros((2, 1, 12, 12), np.int64), "uint8 .pixels. or floating"),
        (np.full((3, 1, 12, 12), np.inf, np.float32), r"images\[0\] holds NaN or infinity"),
        (np.zeros((MAX_BATCH_SIZE + 1, 1, 12, 12), np.uint8), f"must be <= {MAX_BATCH_SIZE}.*max_batch_size=N"),
    ],
)
def test_wrong_images_get_an_error_that_says_what_is_right(
    served: ServedClassifier, images: np.ndarray, message: str
) -> None:
    stub = served.stub_pid
    with served.client() as client:
        with pytest.raises(RequestError, match=message) as error:
            client.classify(images)
        assert "NOTE" not in str(error.value)
        assert client.classify(pixels(1)).logits.shape == (1, 10)
    assert served.stub_pid == stub


def test_wrong_tensors_of_any_client(served: ServedClassifier) -> None:
    stub = served.stub_pid
    good, floats = _tensor("pixels", pixels(2)), _tensor("images", np.zeros((2, 1, 12, 12), np.float32))
    short = _tensor("pixels", pixels(2))
    short._raw_content = pixels(2).tobytes()[:-7]
    empty = _tensor("pixels", pixels(2))
    empty._input.shape[:] = [0, 1, 12, 12]
    cases = [
        ([good, floats], "not both"),
        ([], "."),
        ([_tensor("pixels", np.zeros((2, 1, 12, 12), np.float32))], "pixels"),
        ([_tensor("nothing", pixels(2))], "nothing"),
        ([short], "byte size"),
        ([empty], "."),
    ]
    with triton.InferenceServerClient(served.address) as client:
        for inputs, message in cases:
            with pytest.raises(InferenceServerException, match=message):
                client.infer("classifier", inputs, client_timeout=20)
        assert _logits(client.infer("classifier", [good])).shape == (2, 10)
    assert served.stub_pid == stub


def test_another_kind_of_request_or_model_is_an_error(served: ServedClassifier) -> None:
    with served.client() as client, pytest.raises(ServerError, match="unknown model: 'llm'"):
        client.generate("a")
    with served.client(model="resnet") as client:
        assert not client.is_ready()
        with pytest.raises(ServerError, match="'resnet' is not found"):
            client.classify(pixels(1))


def test_a_full_queue_refuses_and_answers_what_it_holds(served: ServedClassifier) -> None:
    images = pixels(MAX_BATCH_SIZE)

    def ask(_: int) -> str:
        try:
            return str(client.classify(images).logits.shape)
        except OverloadedError as error:
            return str(error)

    with served.client() as client, ThreadPoolExecutor(31) as pool:
        found = list(pool.map(ask, range(31)))
    refused = [text for text in found if "the queue is full" in text]
    assert 0 < len(refused) < 31
    assert len(refused) + found.count(f"({MAX_BATCH_SIZE}, 10)") == 31
    wait_until(
        lambda: served.shown('requests_refused{model="classifier",reason="overloaded"}') >= len(refused), 5, "it"
    )
    assert served.shown('request_success{finished_reason="stop",model="classifier"}') > 0
    assert served.shown('batch_rows_sum{model="classifier"}') > 0


def test_a_request_waits_no_longer_than_it_wants(served: ServedClassifier) -> None:
    """One microsecond, which the way through the queue takes on any machine."""
    request = build_infer("classifier", {"pixels": pixels(1)}, timeout=1e-6)
    before = served.arrived()
    with served.client() as client, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client.classify, pixels(MAX_BATCH_SIZE)) for _ in range(4)]
        wait_until(lambda: served.arrived() > before, 20, "a queue")
        with (
            grpc.insecure_channel(served.address) as channel,  # whose call has no deadline of its own
            pytest.raises(grpc.RpcError, match="timeout expired"),
        ):
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
        for one in running:
            assert one.result(timeout=60).logits.shape == (MAX_BATCH_SIZE, 10)


def test_a_killed_process_is_told_at_once_and_comes_back(served: ServedClassifier) -> None:
    with served.client() as client:
        assert client.is_ready()
        wait_until(lambda: served.health() == 200, 10, "ready")
        before = served.arrived()
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(client.classify, pixels(MAX_BATCH_SIZE)) for _ in range(4)]
            wait_until(lambda: served.arrived() > before, 20, "a queue")
            os.kill(served.stub_pid, signal.SIGKILL)
            wait_until(lambda: not client.is_ready(), 1.0, "being unready")
            for one in running:  # an answer, or an error: none waits in vain
                assert one.exception(timeout=10) is None or isinstance(one.exception(), PenjingError)
        served.wait_ready(restarts=1)
        client.wait_ready(10)  # gRPC tries a lost connection again after a second
        assert client.classify(pixels(2)).logits.shape == (2, 10)


def test_drain_answers_what_is_queued_and_refuses_what_comes(artifact: ClassifierArtifact, local: Any) -> None:
    images = pixels(MAX_BATCH_SIZE)
    expected = artifact.logits(local, images)
    with serving_classifier(artifact.folder, max_batch_size=MAX_BATCH_SIZE, threads=1) as served:
        before = served.arrived()
        with served.client() as client, ThreadPoolExecutor(6) as pool:
            running = [pool.submit(client.classify, images) for _ in range(6)]
            # The sixth runs, or is on its way: the server may refuse it then, so it is left out.
            wait_until(lambda: served.arrived() >= before + 5, 20, "a queue")
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not client.is_ready(), 5, "being unready")
            with pytest.raises((OverloadedError, ServerError)):
                client.classify(pixels(1))
            errors = [one.exception(timeout=60) for one in running]
            assert sum(error is None for error in errors) >= 5
            assert all(isinstance(error, UnavailableError) for error in errors if error is not None)
            answers = [one.result() for one, error in zip(running, errors, strict=True) if error is None]
            assert all(np.array_equal(answer.logits, expected) for answer in answers)
        assert served.process.wait(20) == 0
        assert leftovers(served.config.grpc_port) == []


def _tensor(name: str, array: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), {"u": "UINT8", "f": "FP32"}[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return tensor


def _logits(answer: triton.InferResult | None) -> np.ndarray:
    assert answer is not None
    logits = answer.as_numpy("logits")
    assert logits is not None
    return logits
