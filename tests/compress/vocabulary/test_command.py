"""`penjing compress vocabulary`: what it writes, and that its network computes what it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penjing.compress.cli import app
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.measure.generate import log_likelihoods
from penjing.compress.vocabulary.command import make_smaller_vocabulary
from penjing.compress.vocabulary.smaller import tokens_of
from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, publish_folder
from penjing.core.manifest import read_json_object, read_manifest, verify, write_manifest
from penjing.core.progress import Silent
from penjing.core.text.corpus import heldout_text
from tests.compress.vocabulary.tokenizers_of import byte_fallback, byte_level
from tests.conftest import random_tensors, tiny_config

FEW = EvaluateSettings(prose_tokens=128, code_tokens=128, own_tokens=128, window=64)
UNTIED = {"tie_word_embeddings": False, "head_bias": True, "model_type": "penjing"}
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|><unused1>{% endfor %}"


def write_decoder(folder: Path, tokenizer: str = "", **overrides: Any) -> Path:
    """A random decoder with one of the learnt tokenizers, two padding rows, and all files beside it."""
    text = tokenizer or byte_level()
    ids: dict[str, int] = json.loads(text)["model"]["vocab"]
    size = len(ids)
    start, end = ids["<|start|>"], ids["<|end|>"]
    named = {"vocab_size": size + 2, "bos_token_id": start, "eos_token_ids": (end,), "pad_token_id": end}
    config = tiny_config(**(named | overrides))
    with publish_folder(folder) as partial:
        atomic_write_text(partial / "tokenizer.json", text)
        beside = {
            "bos_token": "<|start|>",
            "eos_token": "<|end|>",
            "chat_template": TEMPLATE,
            "added_tokens_decoder": {str(ids[t]): {"content": t} for t in ("<|start|>", "<|end|>", "<unused0>")},
        }
        atomic_write_text(partial / "tokenizer_config.json", json.dumps(beside))
        generation = {"eos_token_id": [end, ids["a"]], "temperature": 0.5, "suppress_tokens": None}
        atomic_write_text(partial / "generation_config.json", json.dumps(generation))
        save_checkpoint(partial, config, random_tensors(config))
        write_manifest(partial, "checkpoint", {"command": "tests", "license": "apache-2.0"})
    return folder


def shrink(source: Path, out: Path, keep: float, **more: Any) -> dict[str, Any]:
    return make_smaller_vocabulary(source, out, keep, settings=FEW, progress=Silent(), **more)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback])
def test_tokens_that_stay_have_the_logits_that_they_had(tmp_path: Path, tied: bool, tokenizer: Any) -> None:
    source = write_decoder(tmp_path / "whole", tokenizer(), **({} if tied else UNTIED))
    made = shrink(source, tmp_path / "small", 0.8)
    before, after = load_model(source), load_model(tmp_path / "small")
    assert made["tokens"] == after.config.vocab_size == len(after.tokenizer.backend.get_vocab())
    assert made["tokens"] % 64 == 0
    text = heldout_text()[:400]
    new = after.tokenizer.encode(text)
    old = [before.tokenizer.token_to_id(after.tokenizer.id_to_token(token) or "") for token in new]
    assert after.tokenizer.decode(new) == text
    rows = [before.tokenizer.token_to_id(after.tokenizer.id_to_token(row) or "") for row in range(made["tokens"])]
    with torch.no_grad():
        theirs, ours = (x.model(torch.tensor([ids])) for x, ids in ((before, old), (after, new)))
    torch.testing.assert_close(ours, theirs[..., rows], rtol=1e-5, atol=1e-5)
    fewer = sum(p.numel() for p in before.model.parameters()) - sum(p.numel() for p in after.model.parameters())
    assert fewer == made["parameters_fewer"] > 0


def test_a_share_that_is_whole_loses_no_token_to_floating_point() -> None:
    assert tokens_of(0.29, 6400) == 1856
    assert tokens_of(0.3, 6400) == 1920
    assert tokens_of(0.289, 6400) == 1792


def test_every_file_names_tokens_by_their_new_ids(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "whole")
    out = tmp_path / "small"
    shrink(source, out, 0.8)
    verify(out)
    ids = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
    config, generation = read_json_object(out / "config.json"), read_json_object(out / "generation_config.json")
    beside = read_json_object(out / "tokenizer_config.json")
    # the template says one of the reserved tokens, nobody the other
    assert "<unused1>" in ids and "<unused0>" not in ids  # noqa: PT018
    assert (config["bos_token_id"], config["pad_token_id"]) == (ids["<|start|>"], ids["<|end|>"])
    assert generation["eos_token_id"] == [ids["<|end|>"], ids["a"]]
    assert generation["temperature"] == 0.5
    assert beside["added_tokens_decoder"] == {
        str(ids["<|start|>"]): {"content": "<|start|>"},
        str(ids["<|end|>"]): {"content": "<|end|>"},
    }
    made = read_manifest(out).created_by
    assert (made["tokens_before"], made["license"]) == (514, "apache-2.0")


def rewrite(folder: Path, name: str, **values: Any) -> None:
    """Change a file of a folder, which has no manifest then, as those that others made."""
    atomic_write_text(folder / name, json.dumps(read_json_object(folder / name) | values))
    (folder / "penjing.json").unlink(missing_ok=True)


def test_tokens_that_other_files_name_stay_and_ids_without_a_token_are_left_out(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "whole")
    ids: dict[str, int] = json.loads(byte_level())["model"]["vocab"]
    last = max(ids, key=ids.__getitem__)  # learnt last, so that it would leave
    rewrite(source, "generation_config.json", eos_token_id=[ids[last], 513], pad_token_id=-1, suppress_tokens=[{}])
    rewrite(source, "config.json", pad_token_id=513)
    with pytest.raises(InputError, match=r"end-of-text token 513 is not in tokenizer\.json"):
        shrink(source, tmp_path / "small", 0.8)
    rewrite(source, "generation_config.json", eos_token_id=[ids[last]])
    shrink(source, tmp_path / "small", 0.8)
    new = load_model(tmp_path / "small").tokenizer
    generation = read_json_object(tmp_path / "small" / "generation_config.json")
    assert generation["eos_token_id"] == [new.token_to_id(last)]
    assert (generation["pad_token_id"], generation["suppress_tokens"]) == (None, [])
    assert read_json_object(tmp_path / "small" / "config.json")["pad_token_id"] is None


def test_an_embedding_of_other_rows_is_refused(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "whole")
    rewrite(source, "config.json", vocab_size=600)
    with pytest.raises(InputError, match=r"embed_tokens\.weight has 514 rows, config\.json 600 tokens"):
        shrink(source, tmp_path / "small", 0.8)
    assert not (tmp_path / "small").exists()


def test_conversations_are_judged_with_their_control_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_decoder(tmp_path / "whole")
    talk = tmp_path / "talk.jsonl"
    said = {"messages": [{"role": "user", "content": "the end of the file "}]}
    talk.write_text((json.dumps(said) + "\n") * 60)
    read: list[list[int]] = []

    def watched(model: Any, texts: Any) -> list[float]:
        read.extend(list(ids) for ids, _ in texts)
        return log_likelihoods(model, texts)

    monkeypatch.setattr("penjing.compress.vocabulary.smaller.log_likelihoods", watched)
    made = shrink(source, tmp_path / "small", 0.8, texts=[talk], judge=[talk])
    start = [load_model(folder).tokenizer.token_to_id("<|start|>") for folder in (source, tmp_path / "small")]
    judged = [ids for ids in read if len(ids) > 1 and ids.count(ids[0]) > 2]
    assert made["texts"]["talk"]["longer"] == 0
    assert {ids[0] for ids in judged} == set(start)


def test_transformers_reads_it_and_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shrink(write_decoder(tmp_path / "whole"), tmp_path / "small", 0.8)
    ours = load_model(tmp_path / "small")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    text = heldout_text()[:300]
    ids = ours.tokenizer.encode(text, add_special=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (ours.config.bos_token_id, ours.config.eos_token_ids[0])
    with torch.no_grad():
        theirs = network(torch.tensor([ids])).logits
        torch.testing.assert_close(ours.model(torch.tensor([ids])), theirs, rtol=1e-4, atol=1e-4)


def test_a_text_that_loses_no_token_costs_nothing(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "whole")
    own = tmp_path / "own.txt"
    own.write_text("the end of the file " * 200)
    made = shrink(source, tmp_path / "small", 0.65, texts=[own], judge=[own])
    cost = made["texts"]["own"]
    assert cost["longer"] == 0
    # a random network gives away as much to each token that left
    assert cost["rise"]["value"] < 0
    assert made["texts"]["prose"]["longer"] > 0


def test_the_command_shows_what_texts_cost(tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "whole")
    arguments = ["compress", "vocabulary", str(source), str(tmp_path / "small"), "--keep", "0.7"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "made.json")])
    assert done.exit_code == 0, done.output
    assert "320 of 514 tokens" in done.output
    assert "prose" in done.output
    made = json.loads((tmp_path / "made.json").read_text())
    assert made["tokens"] == 320
    assert made["texts"]["prose"]["longer"] > 0
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, InputError)
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


def test_what_has_no_smaller_vocabulary_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source, out = write_decoder(tmp_path / "whole"), tmp_path / "small"
    for share in (1.0, 0.0, 0.05, float("nan")):
        with pytest.raises(ConfigError, match=f"keep={share} of 514 tokens: choose a share"):
            shrink(source, out, share)
    with pytest.raises(ConfigError, match="is the checkpoint itself"):
        shrink(source, source, 0.8, force=True)
    with pytest.raises(InputError, match="cannot be spelled by others"):
        shrink(source, out, 0.4)
    with pytest.raises(InputError, match=r"--text: .*none does not exist"):
        shrink(source, out, 0.8, texts=[tmp_path / "none"])
    with pytest.raises(InputError, match=r"--judge letters: .*letters\.txt does not exist"):
        shrink(source, out, 0.8, judge=[tmp_path / "letters.txt"])
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(InputError, match=r"--judge empty"):
        shrink(source, out, 0.8, judge=[empty])
    with pytest.raises(ConfigError, match="two texts would have one name"):
        shrink(source, out, 0.8, judge=[tmp_path / "prose.txt"])
    small = write_decoder(tmp_path / "narrow", vocab_size=400)
    with pytest.raises(InputError, match="do not belong together"):
        shrink(small, out, 0.9)
    assert not out.exists()


def test_integers_and_other_networks_are_refused(tmp_path: Path, tiny_int8: Path) -> None:
    with pytest.raises(ConfigError, match="is in integers"):
        shrink(tiny_int8, tmp_path / "small", 0.9)
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="only decoders of text"):
        shrink(tmp_path / "net", tmp_path / "small", 0.9)
