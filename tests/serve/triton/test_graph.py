"""A real Triton server with graphs: tensors of several types, encoded images, bad requests."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penjing.core.artifact.onnx_graph import open_graph_artifact, recorded_inputs, run_graph
from penjing.core.artifact.parity import SERVED, read_parity
from penjing.core.errors import PenjingError, RequestError, ServerError
from penjing.core.images.decode import arranged, decode_image, network_input
from penjing.serve.bench.batched import bench_batched
from penjing.serve.parity import served_parity
from tests.core.artifact.graph_artifacts import image_network, lengths_apart, token_network, two_inputs
from tests.serve.triton.classifiers import ServedClassifier, serving_classifier

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_inputs(tmp_path_factory.mktemp("graph") / "net")


@pytest.fixture(scope="module")
def served(artifact: Path) -> Iterator[ServedClassifier]:
    with serving_classifier(artifact, max_batch_size=16, threads=1) as found:
        yield found


def test_tensors_of_two_types_are_answered_under_the_networks_names(served: ServedClassifier, artifact: Path) -> None:
    opened = open_graph_artifact(artifact)
    given = recorded_inputs(opened.parity, opened.config)
    expected = run_graph(opened.session(1), opened.config, given)
    sent = {"x": given["x"], "choice": given["choice"][:, None]}
    with served.client() as client:
        assert client.is_ready()
        found = client.infer(sent)
        assert {name: value.dtype for name, value in found.items()} == {"scores": np.float32, "sure": np.bool_}
        assert np.array_equal(found["scores"], expected["scores"])
        assert np.array_equal(found["sure"], expected["sure"])
        bad: list[tuple[dict[str, object], str]] = [
            ({**sent, "x": given["x"].astype(np.float64)}, "FP64"),
            ({**sent, "x": given["x"][:, :3]}, "unexpected shape"),
            ({"x": given["x"]}, "choice|input"),
            ({**sent, "nobody": given["x"]}, "nobody"),
            ({**sent, "x": np.full((8, 4), np.nan, np.float32)}, "x holds NaN"),
            ({**sent, "choice": np.full((8, 1), 99)}, "cannot compute"),
            ({**sent, "x": np.array([1 + 1j])}, "complex128, which is not sent"),
            ({name: np.repeat(value, 3, 0) for name, value in sent.items()}, "max_batch_size"),
            ({}, "in a dictionary, by name"),
        ]
        for request, message in bad:
            with pytest.raises(PenjingError, match=message):
                client.infer(request)
        assert np.array_equal(client.infer(sent)["scores"], expected["scores"])


def test_the_record_through_the_endpoint_and_the_bench(
    served: ServedClassifier, artifact: Path, tmp_path: Path
) -> None:
    found = served_parity(artifact, served.address)
    assert found["same_bits"] is True
    assert SERVED in read_parity(artifact).outputs
    timed = bench_batched(artifact, served.address, runs=1, rows=32, threads=1)
    assert timed["share"] == timed["rows_per_second"]["server"] / timed["rows_per_second"]["onnxruntime"]
    with pytest.raises(ServerError, match="does it serve that artifact"):
        bench_batched(lengths_apart(tmp_path / "other"), served.address, runs=1)


def test_images_are_decoded_in_the_server(tmp_path: Path) -> None:
    folder = image_network(tmp_path / "net")
    opened = open_graph_artifact(folder)
    pixels = opened.config.pixels
    assert pixels is not None
    photo = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), np.uint8)).save(photo, "JPEG")
    image = arranged(decode_image(photo.getvalue(), pixels), pixels)[None]
    expected = run_graph(opened.session(1), opened.config, {"input": network_input(image, pixels)})["logits"]
    with serving_classifier(folder, max_batch_size=4) as served, served.client() as client:
        assert np.allclose(client.infer({"image": photo.getvalue()})["logits"], expected, atol=1e-5)
        assert np.allclose(client.infer({"pixels": image})["logits"], expected, atol=1e-5)
        for bad in (photo.getvalue()[:300], b"", b"\x89PNG\r\n\x1a\n" + bytes(50)):
            with pytest.raises(RequestError, match="image 1 of the request cannot be read"):
                client.infer({"image": [photo.getvalue(), bad]})
        assert client.infer({"image": [photo.getvalue()] * 3})["logits"].shape == (3, 3)
        assert client.is_ready()


def test_texts_become_tokens_in_the_server(tmp_path: Path) -> None:
    folder = token_network(tmp_path / "net")
    opened = open_graph_artifact(folder)
    ids = np.array([[1, 2, 0, 0, 0], [2, 3, 4, 5, 6]])
    expected = run_graph(opened.session(1), opened.config, {"input_ids": ids, "attention_mask": (ids > 0).astype(int)})
    with serving_classifier(folder, max_batch_size=16, threads=1) as served, served.client() as client:
        assert client.is_ready()
        found = client.infer({"text": ["small trees", "trees grow slowly in pots"]})
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in expected.items()
        }
        assert client.infer({"text": "pots"})["words"].shape == (1, 1, 4)
        sent = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        assert client.infer(sent)["sum"].shape == (2, 4)
        with pytest.raises(RequestError, match="leave input_ids out"):
            client.infer({"text": ["a", "b"], **sent})


def test_the_record_through_a_server_of_small_batches(artifact: Path) -> None:
    with serving_classifier(artifact, max_batch_size=3) as served:
        assert served_parity(artifact, served.address)["same_bits"] is True
        with pytest.raises(RequestError, match=r"batch-size must be <= 3 .* or serve with --set max_batch_size=N"):
            bench_batched(artifact, served.address, runs=1, rows=32, threads=1)


def test_a_network_of_one_image_takes_one_file(tmp_path: Path) -> None:
    folder = image_network(tmp_path / "net", 1)
    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, 8, 6), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[0].transpose(1, 2, 0)).save(file, "PNG")
    with serving_classifier(folder) as served, served.client() as client:
        expected = client.infer({"pixels": pixels})["logits"]
        assert np.array_equal(client.infer({"image": file.getvalue()})["logits"], expected)
        assert np.array_equal(client.infer({"image": [file.getvalue()]})["logits"], expected)


def test_a_network_without_a_batch(tmp_path: Path) -> None:
    folder = lengths_apart(tmp_path / "net")
    with serving_classifier(folder) as served, served.client() as client:
        found = client.infer({"sequence": np.ones((3, 2), np.float16)})
        assert found["total"].tolist() == [3, 3]
        assert found["turned"].shape == (2, 3)
        assert served_parity(folder, served.address)["same_bits"] is True
        assert bench_batched(folder, served.address, runs=1, rows=8)["requests_per_second"]["server"] > 0
