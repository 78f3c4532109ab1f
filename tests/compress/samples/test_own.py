"""Texts that a decoder writes itself: the same every time, kept in pieces, and taken for calibration and healing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.run import run_recipe
from penjing.compress.samples import own
from penjing.compress.samples.data import DataSettings, token_samples
from penjing.compress.samples.own import OWN, OwnTexts, own_texts
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FAMILIES
from penjing.core.progress import Silent
from penjing.core.text.documents import Documents, read_documents
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import make_engine
from penjing.serve.sampling.params import SamplingParams
from tests.begun import with_ends
from tests.compress.conftest import Notes, write_recipe
from tests.compress.keys import result_key

SETTINGS = OwnTexts(samples=6, tokens=24)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_a_model_writes_texts_and_conversations(tiny_checkpoint: Path) -> None:
    found = lines(own_texts(tiny_checkpoint, SETTINGS, Silent()))
    assert ["messages" in line for line in found] == [False, True] * 3
    for line in found[1::2]:
        assert [message["role"] for message in line["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in line["messages"])
    assert len({json.dumps(line) for line in found}) == 6


def test_a_text_is_what_the_engine_samples_behind_a_token(tiny_checkpoint: Path) -> None:
    loaded = load_model(tiny_checkpoint)
    text = lines(own_texts(tiny_checkpoint, OwnTexts(samples=1, tokens=24, seed=3), Silent()))[0]["text"]
    writer = own._Writer(loaded, OwnTexts(samples=1, tokens=24, seed=3))
    first, engine = writer._first_token(0), make_engine(loaded)
    engine.add(Request("0", [first], SamplingParams(temperature=1.0, seed=writer._seed(0, 0), max_tokens=24)))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert text == loaded.tokenizer.decode([first, *tokens])


def test_a_text_begins_as_its_tokenizer_begins_one(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = with_ends(tiny_checkpoint, tmp_path / "begun", begins=True)
    writer, asked = own._Writer(load_model(folder), OwnTexts(samples=1, tokens=24)), list[list[int]]()
    draw = writer._draw

    def kept(prompts: dict[int, list[int]], turn: int, most: int) -> dict[int, list[int]]:
        asked.extend(prompts.values())
        return draw(prompts, turn, most)

    writer._draw = kept  # type: ignore[method-assign]
    assert writer.lines([0])
    assert asked == [[*Tokenizer.from_folder(folder).begin, writer._first_token(0)]]


def test_a_text_depends_on_its_number_and_the_seed_alone(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = lines(own_texts(tiny_checkpoint, SETTINGS, Silent()))
    monkeypatch.setattr(own, "TOGETHER", 2)
    apart = own_texts(tiny_checkpoint, SETTINGS.model_copy(update={"samples": 5}), Silent())
    assert len(list(apart.iterdir())) == 3
    assert lines(apart) == together[:5]
    other = own_texts(tiny_checkpoint, SETTINGS.model_copy(update={"seed": 1}), Silent())
    assert not {json.dumps(line) for line in lines(other)} & {json.dumps(line) for line in together}


def test_a_killed_run_goes_on_and_a_complete_one_is_kept(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "TOGETHER", 2)
    folder = own_texts(tiny_checkpoint, SETTINGS, Silent())
    before = lines(folder)
    kept, lost = sorted(folder.iterdir())[0], sorted(folder.iterdir())[1]
    lost.unlink()
    stamp = kept.stat().st_mtime_ns
    own_texts(tiny_checkpoint, SETTINGS, Silent())
    assert lines(folder) == before
    assert kept.stat().st_mtime_ns == stamp

    def refuse(*_: object) -> None:
        raise AssertionError("it is complete")

    monkeypatch.setattr(own, "load_model", refuse)
    assert own_texts(tiny_checkpoint, SETTINGS, Silent()) == folder


def test_calibration_takes_its_share_of_them(tiny_checkpoint: Path) -> None:
    data = DataSettings(tokens=256, window=64, calibrate=(Path(OWN),), own_texts=SETTINGS)
    windows = token_samples(tiny_checkpoint, data, Silent()).windows
    folder = own_texts(tiny_checkpoint, SETTINGS, Silent())
    assert len(list(read_documents([folder], "x"))) == 6
    tokens = Documents(tiny_checkpoint).tokens([folder], "x")
    assert torch.equal(windows[0], torch.tensor(tokens[:64]))
    assert not torch.equal(
        windows, token_samples(tiny_checkpoint, DataSettings(tokens=256, window=64), Silent()).windows
    )


def test_a_recipe_calibrates_and_heals_with_them(tiny_checkpoint: Path, tmp_path: Path, notes: Notes) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    text = recipe.read_text().replace("window = 64\n[eval", f'window = 64\ncalibrate = ["{OWN}"]\n[eval', 1)
    heal = '[[steps]]\nkind = "prune"\nmethod = "activation"\nratio = 0.2\n[[steps]]\nkind = "distill"\nsteps = 2\n'
    heal += f'batch_size = 2\nsequence_length = 16\nsources = ["{OWN}"]\nevaluation_samples = 0\n'
    own_section = "[data.own_texts]\nsamples = 12\ntokens = 40\n[guard]\nperplexity_ratio = 1e6\n"
    recipe.write_text(text.replace("[[steps]]", f"{own_section}{heal}[[steps]]", 1))
    out = run_recipe(recipe, progress=notes)
    step = json.loads((out / "steps" / "02-distill.json").read_text())["result"]
    assert step["writer"] == str(tiny_checkpoint)
    assert step["data"] == [OWN]
    # of the whole network for pruning, which it is taught with too, and of the healed one before it is rounded
    wrote = [task for task in notes.tasks if "writes" in task]
    assert wrote[0] == "texts that tiny writes"
    assert [task[:21] for task in wrote[1:]] == ["texts that 02-distill"]
    assert f'calibrate = ["{OWN}"]' in (out / "recipe.toml").read_text()


def test_another_decoder_writes_in_its_place(tiny_checkpoint: Path, tmp_path: Path, notes: Notes) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "int8")
    writer = run_recipe(recipe, progress=Silent())
    settings = SETTINGS.model_copy(update={"writer": writer})
    folder = own_texts(tiny_checkpoint, settings, Silent())
    assert folder == own_texts(writer, SETTINGS, Silent()) != own_texts(tiny_checkpoint, SETTINGS, Silent())
    steps = [{"kind": "finetune", "steps": 2, "batch_size": 2, "sequence_length": 16, "sources": [OWN]}]
    steps[0] |= {"evaluation_samples": 0}
    values = {"model": str(tiny_checkpoint), "output": str(tmp_path / "out"), "steps": steps}
    values |= {"evaluate": {"prose_tokens": 64, "code_tokens": 0, "window": 64}, "guard": {"perplexity_ratio": 1e6}}
    values |= {"data": {"tokens": 256, "window": 64, "own_texts": {"samples": 6, "tokens": 24}}}
    key = result_key(values, tmp_path)
    values["data"]["own_texts"]["writer"] = str(writer)
    assert result_key(values, tmp_path) != key
    others = values | {"steps": [steps[0] | {"sources": ["builtin:calibration"]}]}
    key = result_key(others, tmp_path)
    others["data"] = {"tokens": 256, "window": 64}
    assert result_key(others, tmp_path) == key  # what learns from other text is kept, whoever writes
    out = run_recipe(values, progress=notes)
    step = json.loads((out / "steps" / "01-finetune.json").read_text())["result"]
    assert step["writer"] == str(writer)
    assert not [task for task in notes.tasks if "writes" in task]  # what was written above is kept


def test_a_writer_that_is_not_there_is_named_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    nowhere = tmp_path / "nowhere"
    recipe.write_text(recipe.read_text() + f'[data.own_texts]\nwriter = "{nowhere}"\n')
    with pytest.raises(InputError, match="nowhere"):
        run_recipe(recipe, progress=Silent())


def test_a_writer_that_writes_no_text_is_refused_before_anything_runs(
    tiny_checkpoint: Path, tmp_path: Path, notes: Notes
) -> None:
    recipe, encoder = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out"), tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text('{"model_type": "bert"}')
    recipe.write_text(recipe.read_text() + f'[data.own_texts]\nwriter = "{encoder}"\n')
    with pytest.raises(ConfigError, match=r"data\.own_texts\.writer=.* is a text encoder, which writes no text"):
        run_recipe(recipe, progress=notes)
    assert not notes.tasks


def test_other_texts_of_its_own_are_another_healing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    steps = [{"kind": "finetune", "steps": 2, "batch_size": 2, "sequence_length": 16, "sources": [OWN]}]
    values = {"model": str(tiny_checkpoint), "output": str(tmp_path / "out"), "steps": steps}
    values |= {"evaluate": {"prose_tokens": 64, "code_tokens": 0, "window": 64}, "guard": {"perplexity_ratio": 1e6}}
    settings = {"data": {"tokens": 256, "window": 64, "own_texts": {"samples": 12, "tokens": 40}}}
    key = result_key(values | settings, tmp_path)
    assert result_key(values | settings, tmp_path) == key
    settings["data"]["own_texts"]["seed"] = 1
    assert result_key(values | settings, tmp_path) != key


def test_a_text_encoder_writes_nothing(tmp_path: Path) -> None:
    from penjing.compress.samples.data import text_samples

    assert "encoder" in FAMILIES
    with pytest.raises(ConfigError, match="a text encoder, which writes nothing"):
        text_samples(tmp_path, DataSettings(calibrate=(Path(OWN),)), Silent())
