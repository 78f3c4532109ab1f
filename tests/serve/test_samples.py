"""`penjing generate --samples`: many texts, each by its number alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.core.text.records import Record
from penjing.serve.engine.config import EngineConfig
from penjing.serve.generate import generate_stream
from penjing.serve.samples import sample_texts
from penjing.serve.sampling.params import SamplingParams
from penjing.train.data.corpora import documents
from tests.serve.tiny import text_of

SAMPLING = {"temperature": 1.0, "max_tokens": 12, "seed": 5}
FEW = EngineConfig(max_num_sequences=3)


def texts_of(folder: Path) -> list[str]:
    return [record.text for record in documents(str(folder)) if isinstance(record, Record) and record.text]


def test_samples_are_those_of_the_engine_and_a_source_of_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "texts"
    assert sample_texts(tiny_checkpoint, "in the", SAMPLING, 5, out, Silent(), engine_config=FEW) == 5
    texts = texts_of(out)
    assert len(texts) == len(set(texts)) == 5
    params = SamplingParams.from_json(SAMPLING | {"seed": 5 + 3})
    expected = "in the" + text_of(list(generate_stream(tiny_checkpoint, "in the", params)))
    assert texts[3] == expected


def test_a_run_goes_on_where_it_stopped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sample_texts(tiny_checkpoint, "in", SAMPLING, 4, whole, Silent(), engine_config=FEW)
    sample_texts(tiny_checkpoint, "in", SAMPLING, 2, parts, Silent(), engine_config=FEW)
    assert sample_texts(tiny_checkpoint, "in", SAMPLING, 4, parts, Silent(), engine_config=FEW) == 2
    assert sample_texts(tiny_checkpoint, "in", SAMPLING, 4, parts, Silent(), engine_config=FEW) == 0
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in parts.iterdir())
    assert all((whole / name).read_bytes() == (parts / name).read_bytes() for name in names)
    with pytest.raises(InputError, match="samples of another model, adapter, prompt or setting"):
        sample_texts(tiny_checkpoint, "on", SAMPLING, 4, parts, Silent())
    with pytest.raises(InputError, match="holds something else"):
        sample_texts(tiny_checkpoint, "in", SAMPLING, 4, tmp_path, Silent())
    with pytest.raises(ConfigError, match="gives the same text each time; add --temperature"):
        sample_texts(tiny_checkpoint, "in", {"temperature": 0.0}, 4, tmp_path / "x", Silent())


def test_the_command_says_what_it_wrote_and_what_was_there(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "texts"
    command = ["generate", str(tiny_checkpoint), "in", "--temperature", "1", "--max-tokens", "4", "--out", str(out)]
    assert _run([*command, "--samples", "2"]) == 0
    assert f"wrote 2 texts to {out}\n" in capsys.readouterr().err
    assert _run([*command, "--samples", "3"]) == 0
    assert f"wrote 1 text to {out}; 2 were there already\n" in capsys.readouterr().err


def test_what_a_killed_run_leaves_is_whole_samples(tiny_checkpoint: Path, tmp_path: Path) -> None:
    class Killed(Silent):
        num_written = 0

        def advance(self, parts: int = 1) -> None:
            self.num_written += parts
            if self.num_written == 2:
                raise KeyboardInterrupt

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sample_texts(tiny_checkpoint, "in", SAMPLING, 4, whole, Silent(), engine_config=FEW)
    with pytest.raises(KeyboardInterrupt):
        sample_texts(tiny_checkpoint, "in", SAMPLING, 4, killed, Killed(), engine_config=FEW)
    left = sorted(path.name for path in killed.iterdir())
    assert len(left) == 3
    assert all((killed / name).read_bytes() == (whole / name).read_bytes() for name in left)
    (killed / ".sample-000003.txt.partial-1-ab").write_text("half")  # as SIGKILL may leave it
    assert [len(list(documents(str(folder)))) for folder in (killed, whole)] == [2, 4]
    assert sample_texts(tiny_checkpoint, "in", SAMPLING, 4, killed, Silent(), engine_config=FEW) == 2
    assert texts_of(killed) == texts_of(whole)


def test_the_command_writes_the_folder(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", str(tiny_checkpoint), "in", "--max-tokens", "4", "--temperature", "1", "--samples", "2"]
    assert _run([*arguments, "--out", str(tmp_path / "texts")]) == 0
    assert len(list((tmp_path / "texts").glob("*.txt"))) == 2
    assert _run(arguments) == 2
    assert "--samples and --out belong together" in capsys.readouterr().err
