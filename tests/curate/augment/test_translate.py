"""Translation by CTranslate2: a tiny random model of OPUS-MT's kind, converted by CTranslate2's own converter, is
given what transformers' tokenizer gives it."""

from __future__ import annotations

import errno
import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.core.errors import InputError, SetupError
from penjing.curate.augment import translate
from penjing.curate.augment.translate import Apertium, CTranslate2

SENTENCES = ["The list of values is sorted.", "A class has attributes, and so has each of its instances!"]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The converted folder, and what it makes of `SENTENCES` as transformers' tokenizer cuts them."""
    for package in ("ctranslate2", "sentencepiece"):
        pytest.importorskip(package)
    import ctranslate2.converters
    import sentencepiece
    import transformers

    folder = tmp_path_factory.mktemp("marian")
    text = folder / "text.txt"
    text.write_text("\n".join(SENTENCES * 20), encoding="utf-8")
    for name in ("source", "target"):
        sentencepiece.SentencePieceTrainer.Train(
            input=str(text), model_prefix=str(folder / name), vocab_size=40, hard_vocab_limit=False, minloglevel=2
        )
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    known = [pieces.id_to_piece(index) for index in range(3, pieces.get_piece_size())]
    tokens = ["</s>", "<unk>", *known, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    pad = len(tokens) - 1
    kind: Any = transformers.MarianConfig
    config = kind(
        vocab_size=len(tokens), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=pad, eos_token_id=0,
        decoder_start_token_id=pad, forced_eos_token_id=0, bad_words_ids=[[pad]], max_position_embeddings=512,
        init_std=0.5, scale_embedding=True,
    )  # fmt: skip
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers recommends a package
        torch.manual_seed(1)
        model: Any = transformers.MarianMTModel(config).eval()
        # An end that grows likelier with each word: a random model would go on to its last position.
        model.final_logits_bias[0, 0] = 2.0
        model.save_pretrained(folder)
        vocabulary, *spm = (str(folder / name) for name in ("vocab.json", "source.spm", "target.spm"))
        tokenizer: Any = transformers.MarianTokenizer(
            vocab=vocabulary, source_spm=spm[0], target_spm=spm[1], source_lang="en", target_lang="de"
        )
        tokenizer.save_pretrained(folder)
        out = folder / "converted"
        converter = ctranslate2.converters.TransformersConverter(str(folder), copy_files=["source.spm", "target.spm"])
        converter.convert(str(out))
        theirs = ctranslate2.Translator(str(out))
        given = [tokenizer.convert_ids_to_tokens(each) for each in tokenizer(SENTENCES)["input_ids"]]
        found = theirs.translate_batch(given, beam_size=2)
        said = [tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
    return out, [tokenizer.decode(each, skip_special_tokens=True) for each in said]


def test_sentences_end_as_the_model_learnt_it(converted: tuple[Path, list[str]]) -> None:
    folder, expected = converted
    assert CTranslate2(folder)(SENTENCES) == expected


def test_a_converter_that_adds_the_end_itself_gets_none_twice(
    converted: tuple[Path, list[str]], tmp_path: Path
) -> None:
    folder, expected = converted
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"add_source_eos": True}))
    assert CTranslate2(tmp_path)(SENTENCES) == expected


def test_a_sentence_beyond_the_positions_is_not_translated(converted: tuple[Path, list[str]]) -> None:
    assert CTranslate2(converted[0])(["values " * 1000, "One."]) is None


@pytest.mark.parametrize("settings", ["[1]", "{", "7"])
def test_damaged_settings_are_refused(converted: tuple[Path, list[str]], tmp_path: Path, settings: str) -> None:
    for path in converted[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(settings)
    with pytest.raises(InputError, match="cannot be opened by CTranslate2"):
        CTranslate2(tmp_path)


def test_a_machine_without_room_for_apertium_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    modes = tmp_path / "usr/share/apertium/modes"
    modes.mkdir(parents=True)
    (modes / "eng-spa.mode").write_text("cat", encoding="utf-8")
    monkeypatch.setattr(translate, "apertium_folders", lambda _: [tmp_path])
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(SetupError, match=r"no process can be started: .*; end other programs and run again"):
        Apertium("eng-spa", "eng-spa")(["One sentence."])
