"""Text encoders in INT8: the file beside the fake-quantized model, the whole command, refusals, a kill."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.exports import export_artifact
from penjing.compress.graph.own import encoder_network
from penjing.compress.graph.stored import stored
from penjing.compress.parity.encoder import EncoderParity
from penjing.compress.quantize.biases import absorb_biases
from penjing.compress.quantizers.encoder import EncoderQuantize, calibrated_encoder
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.onnx import Quantization
from penjing.core.artifact.onnx_encoder import (
    IDS,
    MASK,
    OUTPUT,
    embed_texts,
    open_encoder_artifact,
    open_encoder_session,
)
from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import Network, tensor_at
from penjing.core.imports.importer import import_model
from penjing.core.progress import Silent
from penjing.core.text.text_tokenizer import TextTokenizer
from tests.compress.products import as_written
from tests.core.models.encoders import write_sentence_transformer

pytestmark = pytest.mark.xdist_group("quantized-encoder")  # one artifact for all
LINEAR = ("query", "key", "value", "output", "up", "down")
TEXTS = [f"the value of {word} is in the list" for word in ("a", "python", "it", "function", "zebra", "name")] * 3
SMALL = ["data.texts=16", "evaluate.texts=16", "guard.similarity_loss=0.1", "steps.0.parity_bound=0.05"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return import_model(str(write_sentence_transformer(folder / "source")), folder / "tiny")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, which torch's exporter takes half as long for."""
    folder = tmp_path_factory.mktemp("shallow")
    return import_model(str(write_sentence_transformer(folder / "source", layers=1)), folder / "tiny")


@pytest.fixture
def recipe(shallow: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(_recipe(shallow, tmp_path))
    return path


def _recipe(checkpoint: Path, folder: Path) -> str:
    return f'model = "{checkpoint}"\noutput = "{folder / "out"}"\n[measure]\nrounds = 0\n[[steps]]\nkind = "quantize"\n'


@pytest.fixture(scope="module")
def ran(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe and what it made; tests that change that take a copy."""
    folder = tmp_path_factory.mktemp("ran")
    recipe = folder / "recipe.toml"
    recipe.write_text(_recipe(shallow, folder))
    return recipe, run(recipe)


def run(recipe: Path, *overrides: str, force: bool = False) -> Path:
    return run_recipe(recipe, [*SMALL, *overrides], force=force)


@dataclass(frozen=True)
class Quantized:
    """An encoder's graph that rounds, and the file that was written of it."""

    network: Network
    tokenize: TextTokenizer
    file: Path

    @torch.no_grad()
    def rows(self) -> np.ndarray:
        return self.network(*self.tokenize(TEXTS).tensors())[0].numpy()


def quantized(checkpoint: Path, folder: Path, target: str = "onnxruntime-cpu") -> Quantized:
    model = load_encoder(checkpoint)
    tokenize = TextTokenizer(checkpoint, model.config)
    settings = EncoderQuantize.model_validate({"target": target})
    network = calibrated_encoder(model, settings, lambda: (tokenize([text]).tensors() for text in TEXTS))
    export_network(stored(network, target), folder / "model.onnx", {}, target)  # type: ignore[arg-type]
    return Quantized(network, tokenize, folder / "model.onnx")


@pytest.fixture(scope="module")
def for_cpu(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    return quantized(checkpoint, tmp_path_factory.mktemp("cpu"))


def test_the_floating_file_computes_what_the_model_does(shallow: Path, tmp_path: Path) -> None:
    model = load_encoder(shallow)
    tokenize = TextTokenizer(shallow, model.config)
    export_network(encoder_network(model), tmp_path / "model.onnx", {})
    with torch.no_grad():
        wanted = model(*tokenize(TEXTS).tensors()).numpy()
    found = embed_texts(open_encoder_session(tmp_path / "model.onnx"), tokenize, TEXTS)
    assert np.abs(found - wanted).max() < 2e-6


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "onnxruntime-avx2", "tensorrt"])
def test_the_quantized_file_computes_what_the_fake_quantized_model_does(
    checkpoint: Path, shallow: Path, tmp_path: Path, for_cpu: Quantized, target: str
) -> None:
    """As written, where ONNX Runtime computes each pair in floating point: equal to rounding."""
    deep = target == "onnxruntime-cpu"
    made = for_cpu if deep else quantized(shallow, tmp_path, target)
    tokenize, wanted = made.tokenize, made.rows()
    session = as_written(made.file, [IDS, MASK], [OUTPUT])
    with torch.no_grad():
        floating = load_encoder(checkpoint if deep else shallow)(*tokenize(TEXTS).tensors()).numpy()
    found = embed_texts(session, tokenize, TEXTS)
    assert (found * wanted).sum(1).min() > 0.999999
    assert np.abs(wanted - floating).max() > 1e-3  # something was rounded
    graph = onnx.load(str(made.file)).graph
    types = {constant.name: constant.data_type for constant in graph.initializer}
    assert all(
        types[f"layers.{i}.{part}.weight"] == onnx.TensorProto.INT8 for i in range(1 + deep) for part in ("query", "up")
    )
    kind = onnx.TensorProto.INT8 if target == "tensorrt" else onnx.TensorProto.UINT8
    assert {types[node.input[2]] for node in graph.node if node.op_type == "QuantizeLinear"} == {kind}


def test_query_key_and_value_read_one_rounded_input(for_cpu: Quantized) -> None:
    graph = onnx.load(str(for_cpu.file)).graph
    names = [node.output[0] for node in graph.node if node.op_type == "QuantizeLinear"]
    assert len(names) == len(set(names)) == 2 * 4  # a layer: its input, and those of output, up, down


def test_smoothing_lowers_the_error(shallow: Path, tmp_path: Path) -> None:
    """With one channel of a norm's output a hundred times larger, as BERTs have them."""
    model = load_encoder(shallow)
    tokenize = TextTokenizer(shallow, model.config)
    with torch.no_grad():
        for layer in model.layers:
            layer.attention_norm.weight[5] *= 100.0  # type: ignore[union-attr, operator, index]
            layer.up.weight[:, 5] /= 100.0  # type: ignore[union-attr, operator, index]
        wanted = model(*tokenize(TEXTS).tensors())
        batches = [tokenize([text]).tensors() for text in TEXTS] * 2  # enough rows to be smoothed by
        found = {}
        for smoothing in (False, True):
            settings = EncoderQuantize(embedding="float32", smooth=smoothing)
            network = calibrated_encoder(model, settings, lambda: batches)
            found[smoothing] = network(*tokenize(TEXTS).tensors())[0]
        export_network(stored(network, "onnxruntime-cpu"), tmp_path / "model.onnx", {}, "onnxruntime-cpu")
    errors = {smoothing: float(1 - (rows * wanted).sum(1).mean()) for smoothing, rows in found.items()}
    assert errors[True] < 0.5 * errors[False]
    rows = embed_texts(as_written(tmp_path / "model.onnx", [IDS, MASK], [OUTPUT]), tokenize, TEXTS)
    assert (rows * found[True].numpy()).sum(1).min() > 0.9999


@torch.no_grad()
def test_biases_of_keys_values_and_down_layers_are_absorbed(shallow: Path, tmp_path: Path) -> None:
    model = load_encoder(shallow)
    tokens = TextTokenizer(shallow, model.config)(TEXTS).tensors()
    wanted = model(*tokens)
    absorb_biases(model)
    assert torch.allclose(model(*tokens), wanted, atol=1e-6)
    network = calibrated_encoder(model, EncoderQuantize(), lambda: [tokens])
    export_network(stored(network, "onnxruntime-cpu"), tmp_path / "model.onnx", {}, "onnxruntime-cpu")
    names = {constant.name for constant in onnx.load(str(tmp_path / "model.onnx")).graph.initializer}
    assert {"layers.0.query.bias", "layers.0.output.bias"} < names
    assert not {"layers.0.key.bias", "layers.0.value.bias", "layers.0.down.bias"} & names


def test_integer_kernels_run_and_company_changes_nothing(for_cpu: Quantized, tmp_path: Path) -> None:
    import onnxruntime

    tokenize = for_cpu.tokenize
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(for_cpu.file), options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "optimised.onnx")).graph.node]
    assert kinds.count("MatMulIntegerToFloat") == 12
    assert not {"Gemm", "QGemm", "MatMul"} & set(kinds)
    assert kinds.count("FusedMatMul") == 4  # both products of attention, which read queries, keys, values as they lie
    assert kinds.count("Transpose") == 2 + 2  # what attention mixed, a layer; ids and mask
    assert not [kind for kind in kinds if kind.startswith(("Skip", "Bias"))]  # which are slower than their parts
    session = open_encoder_session(for_cpu.file, {"session.x64quantprecision": "1"})
    together = embed_texts(session, tokenize, TEXTS)
    alone = np.concatenate([embed_texts(session, tokenize, [text]) for text in TEXTS[:6]])
    assert (together[:6] * alone).sum(1).min() > 0.9999


def test_the_command_makes_an_artifact_that_verifies(ran: tuple[Path, Path]) -> None:
    recipe, out = ran
    artifact = open_encoder_artifact(out)
    report = artifact.report
    assert (report["schema_version"], report["family"]) == (2, "encoder")
    assert [stage["name"] for stage in report["stages"]] == ["00-model", "01-quantize"]
    whole, found = (stage["quality"] for stage in report["stages"])
    assert whole["value"] == pytest.approx(1.0, abs=1e-6)  # the model beside itself
    assert (found["name"], found["samples"]) == ("similarity", 2 * 16)  # queries and documents
    assert {part["name"]: part["samples"] for part in found["parts"]} == {
        "nearest document unchanged": 16, "nearest document right": 16,
    }  # fmt: skip
    cosines = np.frombuffer(base64.b64decode(found["record"]), np.float32)
    assert 0.9 <= cosines.min() <= found["value"] <= 1.0001
    (kept,) = report["decisions"]
    assert (kept["metric"], kept["budget"], kept["outcome"]) == ("similarity", 0.1, "kept")
    assert kept["loss"] == pytest.approx(whole["value"] - found["value"], abs=1e-9)
    assert {row["format"] for row in report["stages"][1]["quantized"]["layers"]} == {"int8"}
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    rows = artifact.embed(artifact.session(1), TEXTS)
    assert rows.shape == (len(TEXTS), 32)
    assert verify_artifact(out)["family"] == "encoder"
    assert artifact.parity.bound.value == 0.05
    stamp = (out / "penjing.json").stat().st_mtime_ns
    run(recipe)  # the same recipe and input: kept
    run_recipe(out / "recipe.toml")  # also as it was written out
    assert (out / "penjing.json").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="another recipe"):
        run(recipe, "steps.0.observer=mse")


def test_a_layer_may_stay_floating(recipe: Path, checkpoint: Path) -> None:
    out = run(recipe, f"model={checkpoint}", 'steps.0.keep=["layers.0.*"]', "steps.0.embedding=float32")
    rows = open_encoder_artifact(out).report["stages"][1]["quantized"]["layers"]
    assert {row["name"] for row in rows} == {f"layers.1.{part}" for part in LINEAR}


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("guard.similarity_loss=0", InputError, r"01-quantize loses too much: .* of similarity lost .*, budget 0; "),
        ("data.texts=100000", InputError, r"data\.texts=100000: there are"),
        ("evaluate.texts=100000", InputError, r"evaluate\.texts=100000: there are"),
        ('steps.0.keep=["head"]', ConfigError, "matches no layer"),
        ("steps.0.activations=int8", ConfigError, "onnxruntime-cpu has no activations in int8"),
        ("steps.0.bits=4", ConfigError, "bits"),
        ("steps.0.learn_weights=true", ConfigError, "unknown key 'steps.0.learn_weights'"),
    ],
)
def test_refusals_publish_nothing(recipe: Path, override: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(recipe, override)
    assert {path.name for path in recipe.parent.iterdir()} <= {"recipe.toml", ".out.work"}  # nothing is published
    assert not list(recipe.parent.rglob("*.partial-*"))


def test_another_file_exceeds_the_parity_bound(for_cpu: Quantized, tmp_path: Path) -> None:
    """The file of a model with one layer's weights lost, beside the whole model."""
    lost = for_cpu.network.copy()
    with torch.no_grad():
        tensor_at(lost.module, "layers.1.down.weight").zero_()
    export_network(stored(lost, "onnxruntime-cpu"), tmp_path / "model.onnx", {}, "onnxruntime-cpu")
    about = Quantization(target="onnxruntime-cpu", activations="uint8", weights="int8", opset=21, session_options={})
    comparison = EncoderParity(TEXTS, for_cpu.tokenize)
    with pytest.raises(InputError, match=r"onnxruntime differs from .*cosine distance, mean.*0\.01; raise parity"):
        comparison.measure(comparison.embedded(for_cpu.network), tmp_path / "model.onnx", about, 0.01)


def test_fp8_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match="fp8"):
        run(recipe, "steps.0.target=tensorrt", "steps.0.activations=fp8")


def test_the_file_is_exported_once_it_passed_again(ran: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = ran
    file = tmp_path / "tiny.onnx"
    record = export_artifact(out, "onnx", file, force=False, progress=Silent())
    assert file.read_bytes() == (out / "model.onnx").read_bytes()
    assert record.differences[0].quantity == "cosine distance"
    assert record.differences[0].mean <= 0.05
    with pytest.raises(ConfigError, match="was quantized for onnxruntime-cpu, and tensorrt wants other quantizers"):
        export_artifact(out, "onnx", tmp_path / "other.onnx", target="tensorrt", force=False, progress=Silent())
    with pytest.raises(InputError, match="a text encoder, which is not written as gguf"):
        export_artifact(out, "gguf", tmp_path / "tiny.gguf", force=False, progress=Silent())


def test_tampering_is_seen(ran: tuple[Path, Path], tmp_path: Path) -> None:
    out = shutil.copytree(ran[1], tmp_path / "out")
    path = out / "parity.json"
    record = json.loads(path.read_text())
    record["bound"]["value"] = 2.0
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"parity\.json has SHA-256"):
        verify_artifact(out)
