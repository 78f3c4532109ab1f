"""A graph without a server: what is joined, what is refused, and that one bad request is alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from onnx import helper
from PIL import Image
from tritonclient.grpc import model_config_pb2

from penjing.core.artifact.onnx_graph import open_graph_artifact, run_graph
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.graph.config import GraphConfig, TensorSpec
from penjing.core.images.decode import network_input
from penjing.serve.families.base import family_at
from penjing.serve.families.graph_model import GraphModel, GraphSettings
from penjing.serve.supervisor.export import export_repository
from tests.core.artifact.graph_artifacts import (
    LABELS,
    image_network,
    lengths_apart,
    token_network,
    two_inputs,
    write_artifact,
)


def model(folder: Path, write: Callable[[Path], Path], **settings: Any) -> GraphModel:
    return GraphModel(write(folder / "net"), GraphSettings(threads=2, **settings))


def local(folder: Path, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    artifact = open_graph_artifact(folder / "net")
    return run_graph(artifact.session(1), artifact.config, inputs)


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((count, 4), np.float32), "choice": rng.integers(0, 5, count)}


def test_requests_are_joined_and_get_their_own_rows(tmp_path: Path) -> None:
    graph = model(tmp_path, two_inputs)
    given = [rows(count, count) for count in (1, 40, 3, 17)]
    begun: list[int] = []
    answers = graph.start([graph.prepare(each) for each in given], lambda: begun.append(1))()
    assert begun == [1]
    for each, answer in zip(given, answers, strict=True):
        assert isinstance(answer, dict)
        expected = local(tmp_path, each)
        assert np.allclose(answer["scores"], expected["scores"], atol=1e-5)
        assert answer["sure"].dtype == np.bool_
        assert answer["sure"].shape == expected["sure"].shape


def test_a_request_that_the_network_cannot_compute_fails_alone(tmp_path: Path) -> None:
    graph = model(tmp_path, two_inputs)
    good, bad, also = rows(2, 1), rows(2, 2) | {"choice": np.array([1, 99])}, rows(3, 3)
    answers = graph.start([graph.prepare(each) for each in (good, bad, also)], lambda: None)()
    assert isinstance(answers[1], RequestError)
    assert "cannot compute" in str(answers[1])
    for each, answer in ((good, answers[0]), (also, answers[2])):
        assert isinstance(answer, dict)
        assert np.allclose(answer["scores"], local(tmp_path, each)["scores"], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 4))}, r"x: float32\[batch, 4\] was given as float64 of shape \[2, 4\]"),
        ({"x": np.zeros((2, 5), np.float32)}, r"was given with the shape \[2, 5\]"),
        ({"x": np.zeros(4, np.float32)}, "was given as float32"),
        ({"x": np.zeros((3, 4), np.float32)}, "give equal sizes"),
        ({"x": np.full((2, 4), np.nan, np.float32)}, "x holds NaN"),
        ({"x": np.zeros((0, 4), np.float32), "choice": np.zeros(0, np.int64)}, "has 0 in axis 'batch'"),
        ({"x": np.zeros((9, 4), np.float32), "choice": np.zeros(9, np.int64)}, "1 to 8 are taken .--set max_batch"),
        ({"x": np.zeros((60, 4), np.float32)}, "the request has 976 bytes, at most 500"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    graph = model(tmp_path, two_inputs, max_batch_size=8, max_request_bytes=500)
    with pytest.raises(RequestError, match=message):
        graph.prepare(rows(2, 0) | change)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    graph = model(tmp_path, two_inputs)
    with pytest.raises(RequestError, match="choice is missing"):
        graph.prepare({"x": np.zeros((2, 4), np.float32)})
    with pytest.raises(RequestError, match="give one of x, got none"):
        graph.prepare({})


def encoded(image: np.ndarray, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, form)
    return file.getvalue()


def test_images_come_as_floats_pixels_or_files_and_a_broken_one_fails_alone(tmp_path: Path) -> None:
    graph = model(tmp_path, image_network)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 8, 6), np.uint8)
    files = np.array([[encoded(image.transpose(1, 2, 0))] for image in pixels], np.object_)
    config = open_graph_artifact(tmp_path / "net").config
    assert config.pixels is not None
    floats = network_input(pixels, config.pixels)
    broken = files.copy()
    broken[1, 0] = files[1, 0][:60]
    named = files.copy()
    named[1, 0] = b"photos/One.JPG"
    given = [{"input": floats}, {"pixels": pixels}, {"image": files}, {"image": broken}, {"image": named}]
    *good, bad, path = graph.start([graph.prepare(each) for each in given], lambda: None)()
    expected = local(tmp_path, {"input": floats})["logits"]
    assert all(np.allclose(answer["logits"], expected, atol=1e-5) for answer in good)  # type: ignore[index]
    assert isinstance(bad, RequestError)
    assert "image 1 of the request cannot be read: it is a broken image" in str(bad)
    assert str(path).endswith("(it is the name of a file: send what the file holds)")
    with pytest.raises(RequestError, match="give one of input, pixels, image, got input and pixels"):
        graph.prepare({"input": floats, "pixels": pixels})


def test_an_image_that_is_no_bytes_is_refused(tmp_path: Path) -> None:
    graph = model(tmp_path, image_network)
    for value in (None, 1 << 40, 1.5, ["a"]):
        held = np.empty((1, 1), np.object_)
        held[0, 0] = value
        with pytest.raises(RequestError, match="bytes of encoded images"):
            graph.prepare({"image": held})


def test_a_network_without_a_batch_takes_any_length_up_to_a_bound(tmp_path: Path) -> None:
    graph = model(tmp_path, lengths_apart)
    given = [{"sequence": np.ones((length, 2), np.float16)} for length in (3, 7, 512)]
    answers = graph.start([graph.prepare(each) for each in given], lambda: None)()
    assert [answer["turned"].shape for answer in answers] == [(2, 3), (2, 7), (2, 512)]  # type: ignore[index]
    with pytest.raises(RequestError, match="has 513 in axis 'length', 1 to 512 are taken"):
        graph.prepare({"sequence": np.ones((513, 2), np.float16)})
    assert GraphModel(tmp_path / "net", GraphSettings(max_axis_size=600)).prepare(given[2]).rows == 1


def centred(folder: Path) -> Path:
    """Takes the mean of the batch from each row."""
    specs = [TensorSpec(name=name, dtype="float32", shape=("batch", 2)) for name in ("x", "y")]
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["y"]),
    ]
    example = {"x": np.random.default_rng(0).standard_normal((4, 2), np.float32)}
    return write_artifact(folder, GraphConfig(inputs=(specs[0],), outputs=(specs[1],)), nodes, {}, example)


def test_rows_that_depend_on_each_other_are_computed_as_they_came(tmp_path: Path) -> None:
    graph = model(tmp_path, centred)
    given = [{"x": np.random.default_rng(seed).standard_normal((40, 2), np.float32)} for seed in range(2)]
    for each, answer in zip(given, graph.start([graph.prepare(x) for x in given], lambda: None)(), strict=True):
        assert isinstance(answer, dict)
        assert np.allclose(answer["y"], each["x"] - each["x"].mean(0), atol=1e-5)
    assert len(graph.example()) == 4


def read(folder: Path) -> Any:
    messages: Any = model_config_pb2
    return text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())


def test_a_repository_has_the_networks_own_tensors(tmp_path: Path) -> None:
    config = read(export_repository(two_inputs(tmp_path / "net"), tmp_path / "models"))
    assert (config.name, config.backend, config.max_batch_size) == ("graph", "onnxruntime", 64)
    assert [(each.name, list(each.dims), each.HasField("reshape")) for each in config.input] == [
        ("x", [4], False), ("choice", [1], True),
    ]  # fmt: skip
    assert [(each.name, list(each.dims)) for each in config.output] == [("scores", [3]), ("sure", [3])]
    assert (tmp_path / "models" / "graph" / "labels.txt").read_text().split() == list(LABELS)
    config = read(export_repository(lengths_apart(tmp_path / "free"), tmp_path / "others"))
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert list(config.input[0].dims) == [-1, 2]
    config = read(export_repository(image_network(tmp_path / "images"), tmp_path / "pictures", "python"))
    assert [(each.name, list(each.dims), each.optional) for each in config.input] == [
        ("input", [3, 8, 6], True), ("pixels", [3, 8, 6], True), ("image", [1], True),
    ]  # fmt: skip
    config = read(export_repository(image_network(tmp_path / "one", 1), tmp_path / "singles", "python"))
    assert [list(each.dims) for each in config.input] == [[1, 3, 8, 6], [1, 3, 8, 6], [1, 1]]


def test_a_repository_calls_its_model_as_it_is_told(tmp_path: Path) -> None:
    net, out = two_inputs(tmp_path / "net"), tmp_path / "models"
    made = export_repository(net, out, name="shoes-2.1")
    assert (made, read(made).name) == (out / "shoes-2.1", "shoes-2.1")
    assert export_repository(net, out, name="shoes-2.1", force=True) == made
    with pytest.raises(InputError, match="not replaced"):  # a repository of another model
        export_repository(net, out, name="hats", force=True)
    for name in ("", "..", "-x", "a/b", "a b", "é", "x" * 64):
        with pytest.raises(ConfigError, match="cannot be a model's name"):
            export_repository(net, tmp_path / "none", name=name)
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_is_not_served_but_what_to_do_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(open_graph_artifact(two_inputs(tmp_path / "n")).config.model_dump_json())
    family = family_at(tmp_path)
    with pytest.raises(InputError, match="checkpoint of a graph"):
        family.check(tmp_path, GraphSettings())


def test_texts_are_tokens_of_the_artifacts_own_tokenizer(tmp_path: Path) -> None:
    graph = model(tmp_path, token_network, text_tokens=4)
    asked = [["small trees", "trees grow"], ["pots"], ["trees grow slowly in pots"]]
    requests = [graph.prepare({"text": _column(texts)}) for texts in asked]
    answers = graph.start(requests, lambda: None)()
    tokens = [[[1, 2], [2, 3]], [[6]], [[2, 3, 4, 5]]]  # the last text is cut
    for ids, answer in zip(tokens, answers, strict=True):
        given = np.array(ids)
        expected = local(tmp_path, {"input_ids": given, "attention_mask": np.ones_like(given)})
        assert isinstance(answer, dict)
        assert {name: value.tolist() for name, value in answer.items()} == {
            name: value.tolist() for name, value in expected.items()
        }
    padded = graph.prepare({"text": _column(["pots", "small trees"])})
    assert padded.arrays["attention_mask"].tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text": np.array([["a"]], object), "input_ids": np.zeros((1, 2), np.int64)}, "leave input_ids out"),
        ({"text": np.array(["a"], object)}, "one text a row"),
        ({"text": np.array([[b"\xff"]], object)}, r"text\[0\] is not UTF-8"),
        ({"text": np.array([["a"]] * 9, object)}, "has 9 in axis 'batch', 1 to 8 are taken"),
    ],
)
def test_texts_that_do_not_fit_are_refused(inputs: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        model(tmp_path, token_network, max_batch_size=8).prepare(inputs)


def test_a_network_without_a_tokenizer_takes_no_texts(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="give one of"):
        model(tmp_path, two_inputs).prepare({"text": _column(["a"])})


def _column(texts: list[str]) -> np.ndarray:
    return np.array([[text.encode()] for text in texts], object)
