"""Text encoders beside transformers' BERT, their checkpoints, and what importing refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import BertModel

from penjing.core.artifact.onnx_encoder import similar_lengths
from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.errors import ConfigError, InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import verify
from penjing.core.text.text_tokenizer import TextTokenizer, encoder_config
from tests.core.models.encoders import write_sentence_transformer

TEXTS = ["The value of a list", "returns it", "a class is an object in python, and that is the name of the function"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_sentence_transformer(tmp_path / "source")


@torch.no_grad()
def reference(folder: Path, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean pooling and length 1, as sentence-transformers defines them."""
    hidden = BertModel.from_pretrained(folder).eval()(input_ids=ids, attention_mask=mask).last_hidden_state
    wide = mask[..., None].to(hidden.dtype)
    return F.normalize((hidden * wide).sum(1) / wide.sum(1), dim=1)


def test_embeddings_equal_transformers(source: Path) -> None:
    model = load_encoder(source)
    ids, mask = TextTokenizer(source, model.config)(TEXTS).tensors()
    assert bool((mask == 0).any())
    with torch.no_grad():
        made = model(ids, mask)
    assert torch.allclose(made, reference(source, ids, mask), atol=1e-6)
    assert torch.allclose(made.norm(dim=1), torch.ones(len(TEXTS)), atol=1e-6)
    assert float((made[0] @ made[1]).abs()) < 0.999  # the texts are told apart


def test_padding_and_company_change_nothing(source: Path) -> None:
    model = load_encoder(source)
    tokenize = TextTokenizer(source, model.config)
    with torch.no_grad():
        together = model(*tokenize(TEXTS).tensors())
        for index, text in enumerate(TEXTS):
            assert torch.allclose(model(*tokenize([text]).tensors())[0], together[index], atol=1e-6)


def test_batches_hold_texts_of_similar_length() -> None:
    lengths = [450, 3, 250, 200, 4, 300, 2000, 150]
    batches = list(similar_lengths(lengths))
    assert batches == [[1, 4, 7], [3, 2], [5], [0], [6]]  # 3 × 150, 2 × 250, then one text each, however long


def test_import_gives_a_folder_that_transformers_reads(source: Path, tmp_path: Path) -> None:
    out = import_model(str(source), tmp_path / "out")
    verify(out)
    ids, mask = TextTokenizer(out, encoder_config(out))(TEXTS).tensors()
    with torch.no_grad():
        assert torch.equal(load_encoder(out)(ids, mask), load_encoder(source)(ids, mask))
    assert torch.allclose(reference(out, ids, mask), reference(source, ids, mask), atol=1e-6)
    before = (out / "penjing.json").stat().st_mtime_ns
    import_model(str(source), out)  # the same import again is kept
    assert (out / "penjing.json").stat().st_mtime_ns == before


def test_long_texts_are_cut_and_no_text_is_refused(source: Path) -> None:
    tokenize = TextTokenizer(source, encoder_config(source))
    assert tokenize(["a " * 1000]).ids.shape == (1, 40)
    assert tokenize([""]).mask.sum() == 2  # begin and end remain
    with pytest.raises(InputError, match="no text to embed"):
        tokenize([])


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"num_attention_heads": 5}, "not divisible by num_attention_heads=5"),
        ("config.json", {"intermediate_size": 65}, r"intermediate\.dense\.weight has the shape \(64, 32\)"),
        ("config.json", {"num_hidden_layers": 3}, r"holds no tensor 'encoder\.layer\.2"),
        ("config.json", {"num_hidden_layers": 10**9}, r"holds no tensor 'encoder\.layer\.999999999"),
        ("config.json", {"num_hidden_layers": 1}, r"'encoder\.layer\.1.* has no place"),
        ("config.json", {"vocab_size": "many"}, "vocab_size"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling_mode_cls_token, pooling_mode_mean_tokens"),
        ("sentence_bert_config.json", {"max_seq_length": 4096}, "max_seq_length=4096 must be 3 … 48"),
    ],
)
def test_what_is_not_computed_is_refused(
    source: Path, tmp_path: Path, file: str, values: dict[str, object], message: str
) -> None:
    change(source / file, **values)
    with pytest.raises(InputError, match=message):
        import_model(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_refused(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="not a complete safetensors file"):
        import_model(str(source), tmp_path / "out")
    path.write_bytes(whole)
    tensors = load_file(path)
    tensors["encoder.layer.1.output.dense.bias"][3] = float("nan")
    save_file(tensors, path)
    with pytest.raises(InputError, match=r"encoder\.layer\.1\.output\.dense\.bias .* NaN"):
        import_model(str(source), tmp_path / "out")


def test_a_tokenizer_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"][:50].clone()
    save_file(tensors, source / "model.safetensors")
    change(source / "config.json", vocab_size=50)
    with pytest.raises(InputError, match="do not belong together"):
        import_model(str(source), tmp_path / "out")


def test_encoders_are_stored_in_float32(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a text encoder is stored in float32"):
        import_model(str(source), tmp_path / "out", dtype="bfloat16")
    (source / "modules.json").write_text("[1]")
    with pytest.raises(InputError, match=r"modules\.json is damaged"):
        import_model(str(source), tmp_path / "out")
