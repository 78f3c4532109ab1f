"""GGUF files of decoder artifacts: the gguf package, our importer and transformers read the same network back."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import save_file

from penjing.compress.decoder_onnx.graph import write_decoder_onnx
from penjing.compress.export.compressed_tensors import write_compressed_tensors
from penjing.compress.gguf.architecture import stored_names, written_as
from penjing.compress.gguf.blocks import q8_0
from penjing.compress.gguf.write import write_gguf
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.models.decoder import Decoder
from penjing.core.models.rope import at_context, usual_context
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.gguf.artifacts import FAMILIES, LONGROPE, MOE, YARN, make_int8
from tests.conftest import tiny_config
from tests.core.gguf.gguf_files import transformers_model
from tests.disk import run_in


def test_integers_are_the_artifact_s_and_the_model_is_the_same(tiny_int8: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    assert _run(["export", str(tiny_int8), str(out), "--to", "gguf"]) == 0
    checkpoint = open_checkpoint(tiny_int8)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    down = reader["blk.1.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.Q8_0
    stored = checkpoint.get("model.layers.1.mlp.down_proj.weight")
    blocks = np.array(down.data).reshape(stored.shape[0], -1, 34)
    assert np.array_equal(blocks[:, :, 2:].reshape(stored.shape).view(np.int8), stored.numpy())

    import_model(str(out), tmp_path / "back")
    back = open_checkpoint(tmp_path / "back")
    for name in back.tensor_names:
        expected = checkpoint.get(name).to(torch.float32)
        if f"{name}_scale" in checkpoint.tensor_names:
            expected = expected * checkpoint.get(f"{name}_scale")
        torch.testing.assert_close(back.get(name), expected, rtol=2**-10, atol=1e-6)
    text = "The quick brown fox\n  jumps: 1234 <|im_end|>"
    ids = Tokenizer.from_folder(tiny_int8).encode(text)
    assert Tokenizer.from_folder(tmp_path / "back").encode(text) == ids
    tokens = torch.tensor([ids[:24]])
    with torch.no_grad():
        ours, theirs = load_model(tiny_int8).model(tokens), load_model(tmp_path / "back").model(tokens)
    assert (ours - theirs).square().mean().sqrt() < 0.1 * ours.std()  # activations are INT8 in one of them


def test_integers_are_identical_in_every_export(tiny_int8: Path, tmp_path: Path) -> None:
    """ONNX stores them transposed, GGUF in blocks of 32 with the rows of q and k in another order."""
    artifact = open_decoder_artifact(tiny_int8)
    for name in ("onnx", "compressed"):
        (tmp_path / name).mkdir()
    write_decoder_onnx(artifact.checkpoint, "onnxruntime-avx2", tmp_path / "onnx", Silent())
    write_compressed_tensors(artifact, tmp_path / "compressed")
    write_gguf(artifact.checkpoint, tmp_path / "model.gguf", Silent())
    model = onnx.load(str(tmp_path / "onnx" / "model.onnx"))
    constants = {constant.name: numpy_helper.to_array(constant) for constant in model.graph.initializer}
    blocks = {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    checkpoint, compared = open_checkpoint(tmp_path / "compressed"), 0
    written = stored_names(written_as(checkpoint.config, "artifact")[0])
    place_of = {name: theirs for theirs, ours in written.items() for name in ours}
    written = stored_names(written_as(checkpoint.config, "artifact")[0])
    place_of = {name: theirs for theirs, ours in written.items() for name in ours}
    for name in checkpoint.tensor_names:
        if checkpoint.dtype(name) != "I8":
            continue
        stored = checkpoint.get(name).numpy()
        assert np.array_equal(constants[name].astype(np.int16).T - 128, stored), name
        rows = blocks[place_of[name]].reshape(len(stored), -1, 34)[:, :, 2:].reshape(stored.shape).view(np.int8)
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        assert np.array_equal(np.sort(rows, axis=0) if turned else rows, np.sort(stored, axis=0) if turned else stored)
        compared += 1
    assert compared == 15


def test_a_file_that_reads_back_otherwise_is_refused(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = gguf.GGUFWriter.write_tensors_to_file

    def flip(writer: gguf.GGUFWriter) -> None:
        real(writer)
        assert writer.fout is not None
        writer.fout[0].flush()
        writer.fout[0].seek(-100, 2)
        writer.fout[0].write(b"\x55")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", flip)
    assert _run(["export", str(tiny_int8), str(tmp_path / "model.gguf"), "--to", "gguf"]) == 3
    assert "does not read back" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_blocks_are_those_of_the_gguf_package() -> None:
    generator = np.random.default_rng(0)
    weight = generator.integers(-127, 128, (5, 96)).astype(np.int8)
    scale = generator.uniform(1e-3, 1e-2, 5).astype(np.float16).astype(np.float32)
    back = gguf.dequantize(q8_0(weight, scale), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(back, weight.astype(np.float32) * scale[:, None])


def test_scales_that_folded_norms_make_small_are_written() -> None:
    weight, scale = np.full((64, 32), 127, np.int8), np.geomspace(2.0**-16, 2.0**-13, 64).astype(np.float32)
    back = gguf.dequantize(q8_0(weight, scale), gguf.GGMLQuantizationType.Q8_0)
    assert np.allclose(back, weight * scale[:, None], rtol=2**-9, atol=0)


def test_what_q8_0_cannot_hold_is_refused(tiny_int8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="needs a multiple of 32"):
        q8_0(np.zeros((2, 40), np.int8), np.ones(2, np.float32))
    for wrong in (1e-9, 1e5):
        with pytest.raises(InputError, match="too large or too small for float16"):
            q8_0(np.zeros((2, 32), np.int8), np.array([1.0, wrong], np.float32))
    (tmp_path / "file").write_text("")
    assert _run(["export", str(tiny_int8), str(tmp_path / "file" / "x.gguf"), "--to", "gguf"]) == 3
    assert "is a file, so" in capsys.readouterr().err
    (tmp_path / "file").unlink()
    assert not list(tmp_path.iterdir())


def test_widths_that_q8_0_cannot_hold_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    shapes = {"a.weight": (2, 64), "a.weight_scale": (2, 1), "b.weight": (2, 40), "norm.weight": (40,)}
    kinds = {"a.weight": "I8", "a.weight_scale": "F32", "b.weight": "I8", "norm.weight": "F32"}
    checkpoint = SimpleNamespace(
        config=None, folder=Path("net"), tensor_names=tuple(shapes), shape=shapes.get, dtype=kinds.get
    )
    with pytest.raises(InputError, match=r"net: b\.weight has rows of 40 numbers; Q8_0 needs a multiple of 32"):
        write_gguf(checkpoint, tmp_path / "net.gguf", Silent())  # type: ignore[arg-type]


EXPORTS = """
    import shutil, sys
    from collections import namedtuple
    from pathlib import Path
    from penjing.compress.exports import export_artifact
    from penjing.core.errors import SetupError
    from penjing.core.progress import Silent

    folder, source = Path(sys.argv[1]), Path(sys.argv[2])
    usage = shutil.disk_usage
    for room in ("seen", "taken"):
        shutil.disk_usage = usage if room == "seen" else lambda path: namedtuple("Usage", "free")(1 << 30)
        try:
            export_artifact(source, "gguf", folder / "model.gguf", force=False, progress=Silent())
        except SetupError as error:
            print(error)
        assert not list(folder.iterdir())
"""


@pytest.mark.parametrize("place", ["tiny disk", "file limit"])
def test_a_full_disk_is_one_error_and_leaves_nothing(place: str, tiny_int8: Path, tmp_path: Path) -> None:
    """The second time another program has taken the room, and numpy, which writes the tensors, does not say why."""
    said = run_in(place, 1 << 16, tmp_path, EXPORTS, str(tiny_int8), forked=True)
    if place == "file limit":
        assert said == [f"cannot write {tmp_path}/model.gguf: the file-size limit is reached; raise it (ulimit -f) and "
                        "run again"] * 2  # fmt: skip
        return
    assert re.fullmatch(
        r"cannot write .*/model.gguf: the disk is full, \d+ kB are needed and \S+ kB are free; .*", said[0]
    )
    assert said[1] == f"cannot write {tmp_path}/model.gguf: the disk is full; free some space and run again"


TOKENS = torch.arange(48).view(1, -1) * 7 % 320


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_comes_in_goes_out(tmp_path: Path, tiny_checkpoint: Path, family: str) -> None:
    """What our importer reads computes what the artifact's integers say, to the rounding of scales to float16."""
    checkpoint = make_int8(tmp_path / "artifact", tiny_checkpoint, **FAMILIES[family])
    write_gguf(checkpoint, tmp_path / "model.gguf", Silent())
    import_model(str(tmp_path / "model.gguf"), tmp_path / "back")
    back = load_model(tmp_path / "back")
    own = dequantized(checkpoint, usual_context(checkpoint.config))
    with torch.no_grad():
        is_close(back.model(TOKENS), own(TOKENS), 2**-8 if checkpoint.config.moe or "longrope" in family else 2**-9)
    wanted, given = checkpoint.config, back.config
    assert given.rms_norm_eps == wanted.rms_norm_eps
    assert (given.bos_token_id, given.eos_token_ids, given.pad_token_id) == (0, (2,), 2)
    context = min(wanted.max_position_embeddings, wanted.sliding_window or 512)
    if wanted.rope_scaling.rope_type == "longrope":  # imported for the original context unless another is asked for
        import_model(str(tmp_path / "model.gguf"), tmp_path / "beyond", context=context)
        beyond, context = load_model(tmp_path / "beyond").model, 32
        with torch.no_grad():
            is_close(beyond(TOKENS), dequantized(checkpoint)(TOKENS), 2**-8)  # its factor makes attention sharper
            assert (beyond(TOKENS) - back.model(TOKENS)).std() > 0.1 * beyond(TOKENS).std()
    assert given.max_position_embeddings == context


@pytest.mark.parametrize("family", ["llama-untied", "qwen2", "qwen3-128", "qwen2-moe", "qwen3-moe"])
def test_transformers_reads_the_same_network(tmp_path: Path, tiny_checkpoint: Path, family: str) -> None:
    checkpoint = make_int8(tmp_path / "artifact", tiny_checkpoint, **FAMILIES[family])
    write_gguf(checkpoint, tmp_path / "model.gguf", Silent())
    with torch.no_grad():
        theirs = transformers_model(tmp_path / "model.gguf")(TOKENS).logits
        is_close(theirs, dequantized(checkpoint)(TOKENS), 2**-8 if checkpoint.config.moe else 2**-9)


def is_close(logits: torch.Tensor, expected: torch.Tensor, bound: float = 2**-9) -> None:
    """Scales and what is not in INT8 are rounded to float16: 2⁻¹² of each weight, more after two layers, and more again
    where shares of experts follow from it."""
    error = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    print(error)
    assert error < bound


def dequantized(checkpoint: Checkpoint, context: int | None = None) -> Decoder:
    """The decoder that the integers and scales of a checkpoint stand for, in float32, for another context."""
    config = checkpoint.config
    model = Decoder(config if context is None else at_context(config, context))
    for name, parameter in model.named_parameters():
        value = checkpoint.get(name).to(torch.float32)
        if f"{name}_scale" in checkpoint.tensor_names:
            value = value * checkpoint.get(f"{name}_scale")
        parameter.data = value
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "penjing", "shared_layers": 2}, "shared_layers=2"),
        ({"model_type": "penjing", "mlp_hadamard": 32}, "mlp_hadamard=32"),
        (
            {"model_type": "penjing", "layer_types": ["lsh_attention", "full_attention"]},
            "layer_types=full_attention/lsh_attention",
        ),
        ({"model_type": "penjing", "qk_norm": True, "mlp_bias": True}, "has qk_norm=True"),
        (
            {"model_type": "qwen3_moe", "qk_norm": True, "moe": MOE | {"norm_topk_prob": False}},
            "experts with norm_topk_prob=False, which qwen3moe",
        ),
        (
            {"model_type": "qwen3_moe", "qk_norm": True, "moe": MOE | {"mlp_only_layers": (1,)}},
            r"experts with mlp_only_layers=\(1,\)",
        ),
        ({"qk_norm": True, "attention_output_bias": True, "moe": MOE}, "attention_output_bias=True, which qwen3moe"),
        (
            {"model_type": "qwen3", "qk_norm": True, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "has rotary scaling 'llama3', which qwen3",
        ),
        ({"rope_scaling": YARN | {"truncate": False}}, "with truncate=False"),
        (
            {"model_type": "qwen3", "qk_norm": True, "rope_scaling": LONGROPE},
            "rotary scaling 'longrope', which qwen3",
        ),
    ],
)
def test_what_gguf_cannot_say_is_refused_by_name(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        written_as(tiny_config(**overrides), "artifact")


def test_a_weight_beyond_float16_is_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    checkpoint = make_int8(tmp_path / "artifact", tiny_checkpoint)
    tensors = {name: checkpoint.get(name).clone() for name in checkpoint.tensor_names}
    tensors["model.embed_tokens.weight"][5, 5] = 1e6
    save_file(tensors, tmp_path / "artifact" / "model.safetensors")
    with pytest.raises(InputError, match=r"embed_tokens.weight holds 1e\+06, beyond float16"):
        write_gguf(open_checkpoint(tmp_path / "artifact"), tmp_path / "model.gguf", Silent())
