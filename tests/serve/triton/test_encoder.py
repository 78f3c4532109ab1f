"""A real Triton server with a small INT8 text encoder: answers, company, bad texts, the exported repository."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from penjing.compress.run import run_recipe
from penjing.core.artifact.onnx_encoder import EncoderArtifact, open_encoder_artifact
from penjing.core.artifact.parity import SERVED, read_parity
from penjing.core.cli import _run
from penjing.core.errors import InputError, RequestError
from penjing.core.imports.importer import import_model
from penjing.serve.bench.batched import bench_batched
from penjing.serve.client.client import AsyncClient
from penjing.serve.parity import served_parity
from penjing.serve.supervisor.export import export_repository
from tests.core.models.encoders import small_recipe, write_sentence_transformer
from tests.serve.triton.classifiers import ServedClassifier, serving_classifier

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]
WORDS = ("a", "it", "class", "name", "object")
ROUNDING = 1e-5  # texts run in other company than in one batch, so that other padding stands beside them
TEXTS = [f"the value of {word} is in the list of {index}" for index, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> EncoderArtifact:
    folder = tmp_path_factory.mktemp("encoder")
    checkpoint = import_model(str(write_sentence_transformer(folder / "source")), folder / "tiny")
    return open_encoder_artifact(run_recipe(small_recipe(checkpoint, folder / "int8")))


@pytest.fixture(scope="module")
def served(artifact: EncoderArtifact) -> Iterator[ServedClassifier]:
    with serving_classifier(artifact.folder, max_batch_size=16, threads=1) as found:
        yield found


@pytest.fixture(scope="module")
def local(artifact: EncoderArtifact) -> Any:
    """ONNX Runtime in this process."""
    return artifact.session(threads=1)


def test_answers_are_local_onnx_runtimes(served: ServedClassifier, artifact: EncoderArtifact, local: Any) -> None:
    with served.client() as client:
        assert client.is_ready()
        assert np.allclose(client.embed(TEXTS), artifact.embed(local, TEXTS), atol=ROUNDING)
        assert client.embed("one text").shape == (1, 32)

    async def ask() -> np.ndarray:
        async with AsyncClient(served.address) as client:
            return await client.embed(TEXTS[:2])

    assert np.allclose(asyncio.run(ask()), artifact.embed(local, TEXTS[:2]), atol=ROUNDING)


def test_plain_tritonclient_works(served: ServedClassifier, artifact: EncoderArtifact, local: Any) -> None:
    tensor = triton.InferInput("text", [len(TEXTS), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in TEXTS], np.object_))
    with triton.InferenceServerClient(served.address) as client:
        answer = client.infer("encoder", [tensor])
        assert answer is not None
        found = answer.as_numpy("embedding")
    assert found is not None
    assert np.allclose(found, artifact.embed(local, TEXTS), atol=ROUNDING)


def test_requests_together_do_not_touch_each_other(
    served: ServedClassifier, artifact: EncoderArtifact, local: Any
) -> None:
    """Texts of other lengths pad a row, which may turn a value near a tie; nothing more."""
    texts = [f"{TEXTS[index % 5]} {'of the ' * (index % 7)}" for index in range(60)]
    expected = np.concatenate([artifact.embed(local, [text]) for text in texts])
    with served.client() as client, ThreadPoolExecutor(8) as pool:
        found = np.concatenate(list(pool.map(lambda text: client.embed([text]), texts)))
    assert (found * expected).sum(1).min() > 0.999


def test_bench(served: ServedClassifier, artifact: EncoderArtifact, tmp_path: Path) -> None:
    found = bench_batched(artifact.folder, served.address, runs=1, texts=1, threads=1)
    speeds = found["texts_per_second"]
    assert found["share"] == speeds["server"] / speeds["onnxruntime"] > 0
    assert 0 < found["latency_ms"]["p50"] <= found["latency_ms"]["p99"]
    out = tmp_path / "bench.json"
    command = ["bench", "server", str(artifact.folder), "--server", served.address, "--runs", "1", "--json", str(out)]
    assert _run(command) == 0
    assert set(json.loads(out.read_text())["texts_per_second"]) == {"onnxruntime", "server"}


def test_parity_through_the_endpoint(served: ServedClassifier, artifact: EncoderArtifact) -> None:
    result = served_parity(artifact.folder, served.address)
    assert isinstance(result["same_bits"], bool)
    assert all(difference["mean"] < 1e-3 for difference in result["differences"])
    assert SERVED in read_parity(artifact.folder).outputs


def test_bad_texts_are_their_requests_own(served: ServedClassifier) -> None:
    with served.client() as client:
        for bad, message in (
            ([], "one or more"),
            ([1, 2], "one text or a list"),
            (["\ud800"], r"text\[0\] is not UTF-8"),
            (["a" * (2 << 20)], r"text\[0\] has 2097152 bytes"),
            (["a"] * 17, "max_batch_size"),
        ):
            with pytest.raises(RequestError, match=message):
                client.embed(bad)  # type: ignore[arg-type]
        assert client.embed([""]).shape == (1, 32)


def test_a_repository_is_exported_and_a_checkpoint_refused(artifact: EncoderArtifact, tmp_path: Path) -> None:
    made = export_repository(artifact.folder, tmp_path / "models")
    text = (made / "config.pbtxt").read_text()
    assert made.name == "encoder"
    assert 'name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ]' in text
    assert (made / "1" / "model.onnx").read_bytes() == (artifact.folder / "model.onnx").read_bytes()
    python = export_repository(artifact.folder, tmp_path / "python", "python")
    assert 'name: "text" data_type: TYPE_STRING' in (python / "config.pbtxt").read_text()
    with pytest.raises(InputError, match="checkpoint of a text encoder"):
        export_repository(artifact.folder.parent / "tiny", tmp_path / "none")
