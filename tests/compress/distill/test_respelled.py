"""A teacher of more tokens: its probabilities over the pieces of its tokens, and a student that learns from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as Backend

from penjing.compress.distill.networks import check_decoder, decoder
from penjing.compress.distill.respelled import CERTAIN, Respelled, is_respelled
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.text.corpus import calibration_text, heldout_text
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.vocabulary.test_command import shrink, write_decoder
from tests.compress.vocabulary.tokenizers_of import byte_fallback, byte_level, space_before

KINDS = {"bytes as characters": byte_level, "bytes beside characters": byte_fallback, "a space before": space_before}


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(Student of fewer tokens, teacher)."""
    folder = tmp_path_factory.mktemp("respelled")
    teacher = write_decoder(folder / "whole", KINDS[request.param]())
    shrink(teacher, folder / "small", 0.65)
    return folder / "small", teacher


def respelled(student: Path, teacher: Path) -> Respelled:
    return Respelled(decoder(check_decoder(student, teacher, respelled=True)), student, teacher)


@torch.no_grad()
def test_a_piece_has_the_probability_of_all_tokens_that_begin_with_it(pair: tuple[Path, Path]) -> None:
    student, teacher = pair
    small, large = load_model(student), load_model(teacher)
    text = heldout_text()[:200] + " é日"
    ids = small.tokenizer.encode(text, allow_special=False, add_special=False)
    read = large.tokenizer.encode(text, allow_special=False, add_special=False)
    assert len(read) < len(ids)
    logits = respelled(student, teacher)(torch.tensor([ids]))[0]
    assert logits.shape == (len(ids), small.config.vocab_size)
    theirs = large.model(torch.tensor([read]))[0].softmax(-1)
    # By another way: the library itself spells each of the teacher's tokens, and says where tokens end in the text.
    small_ends, large_ends = (
        [end for _, end in tokenizer.backend.encode(text, add_special_tokens=False).offsets]
        for tokenizer in (small.tokenizer, large.tokenizer)
    )
    firsts = [first_piece(small.tokenizer.backend, large.tokenizer.backend, row) for row in range(len(theirs[0]))]
    judged = 0
    for place, end in enumerate(large_ends):
        if large_ends.count(end) > 1 or small_ends.count(end) > 1:  # bytes of one character
            continue
        expected = torch.zeros(small.config.vocab_size)
        for row, first in enumerate(firsts):
            if first is not None:
                expected[first] += theirs[place, row]
        got = logits[small_ends.index(end)].exp()
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)
        judged += 1
    assert judged > 50


def first_piece(small: Backend, large: Backend, row: int) -> int | None:
    """Of a token of the larger vocabulary; None of a row without one."""
    token = large.id_to_token(row)
    if token is None:
        return None
    if (same := small.token_to_id(token)) is not None:
        return same
    return small.model.tokenize(token)[0].id


def test_between_pieces_the_text_is_the_answer(pair: tuple[Path, Path]) -> None:
    student, teacher = pair
    small, large = load_model(student).tokenizer, load_model(teacher).tokenizer
    kept = small.backend.get_vocab()
    gone = sorted(
        token for token in large.backend.get_vocab() if token not in kept and len(token) > 4 and "<" not in token
    )
    # A token within words is read otherwise where it begins a text.
    gone = [token for token in gone if tokens_of(large, large.decode([large.token_to_id(token) or 0])) == [token]]
    ids = [small.token_to_id(piece) or 0 for piece in pieces(small.backend, gone[0])]
    assert len(ids) > 1
    logits = respelled(student, teacher)(torch.tensor([ids]))[0]
    for place in range(len(ids) - 1):
        assert int(logits[place].argmax()) == ids[place + 1]
        assert logits[place].topk(2).values.tolist() == [0.0, -CERTAIN]


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [
        tokenizer.backend.id_to_token(row) for row in tokenizer.encode(text, allow_special=False, add_special=False)
    ]


def pieces(backend: Backend, token: str) -> list[str]:
    return [piece.value for piece in backend.model.tokenize(token)]


def test_control_tokens_padding_and_documents_go_through(pair: tuple[Path, Path]) -> None:
    student, teacher = pair
    tokenizer = load_model(student).tokenizer
    start, end = tokenizer.token_to_id("<|start|>"), tokenizer.token_to_id("<|end|>")
    assert start is not None
    assert end is not None
    texts = [tokenizer.encode(heldout_text()[at : at + 300], add_special=False)[:40] for at in (0, 500)]
    rows = torch.tensor([[start, *texts[0][:18], end, *texts[1][:19], end], [*texts[1][:20], *texts[0][:20]]])
    documents = (rows == end).cumsum(1) - (rows == end).long()
    taught = respelled(student, teacher)
    both = taught(rows, documents=documents)
    # what stands behind the first document is as it would be without it
    alone = taught(rows[:1, 20:])
    torch.testing.assert_close(both[:1, 20:], alone, rtol=1e-3, atol=1e-3)
    assert torch.isfinite(both).all()


@pytest.mark.parametrize("text", ["日本 and the rest of the paragraph 日", "ing of the paragraph and the rest"])
def test_a_window_may_begin_and_end_within_a_character_or_a_word(pair: tuple[Path, Path], text: str) -> None:
    student, teacher = pair
    small, large = load_model(student).tokenizer, load_model(teacher).tokenizer
    ids = small.encode(text, allow_special=False, add_special=False)[1:-1]
    tokens, ends = respelled(student, teacher)._ends(ids)
    assert len(tokens) == len(ends) < len(ids)
    assert ends == sorted(set(ends))
    assert ends[-1] == len(ids) - 1
    spelled = (
        "".join(each.id_to_token(number) or "" for number in row) for each, row in ((small, ids), (large, tokens))
    )
    assert len(set(spelled)) == 1


def test_other_vocabularies_teach_nobody(tmp_path: Path, tiny_checkpoint: Path) -> None:
    teacher = write_decoder(tmp_path / "whole")
    shrink(teacher, tmp_path / "small", 0.65)
    assert is_respelled(tmp_path / "small", teacher)
    assert not is_respelled(teacher, tmp_path / "small")
    assert not is_respelled(tiny_checkpoint, teacher)
    with pytest.raises(InputError, match="take a teacher with the student's tokenizer"):
        check_decoder(tiny_checkpoint, teacher, respelled=True)
    with pytest.raises(InputError, match="take a teacher with the student's tokenizer"):
        check_decoder(tmp_path / "small", teacher)


def test_a_tokenizer_that_changes_what_it_reads_is_refused(tmp_path: Path) -> None:
    values = json.loads(byte_level())
    strip = {"type": "Strip", "content": "A", "start": 1, "stop": 0}
    values["decoder"] = {"type": "Sequence", "decoders": [values["decoder"], strip]}
    teacher = write_decoder(tmp_path / "whole", json.dumps(values))
    shrink(teacher, tmp_path / "small", 0.65)
    network = decoder(open_checkpoint(teacher))
    with pytest.raises(InputError, match="changes what it reads"):
        Respelled(network, tmp_path / "small", teacher)


def recipe(student: Path, teacher: Path, output: Path, **step: Any) -> dict[str, Any]:
    text = output.with_name("text.txt")  # so short that a cache of the teacher's answers is made in a second
    text.write_text(calibration_text()[:12_000])
    distill = {
        "kind": "distill",
        "teacher": str(teacher),
        "steps": 24,
        "batch_size": 4,
        "sequence_length": 32,
        "sources": [str(text)],
        "learning_rate": {"peak": 3e-3, "warmup": 0.1},
        "evaluation_samples": 0,
    }
    return {
        "model": str(student),
        "output": str(output),
        "evaluate": {"prose_tokens": 128, "code_tokens": 0, "window": 64},
        "measure": {"rounds": 0},
        "guard": {"perplexity_ratio": 100.0},
        "steps": [distill | step],
    }


@pytest.mark.parametrize("step", [{}, {"cache_top_k": 8}], ids=["asked each time", "asked once"])
def test_a_step_of_a_recipe_learns_from_the_whole_network(pair: tuple[Path, Path], tmp_path: Path, step: Any) -> None:
    student, teacher = pair
    step = step | ({"cache_folder": str(tmp_path / "cache")} if step else {})
    out = run_recipe(recipe(student, teacher, tmp_path / "out", **step))
    tokenizer = load_model(student).tokenizer
    ids = torch.tensor([tokenizer.encode(heldout_text()[:400], allow_special=False, add_special=False)])
    with torch.no_grad():
        wanted = respelled(student, teacher)(ids)[0].softmax(-1)
        left = [F.cross_entropy(load_model(folder).model(ids)[0], wanted) for folder in (student, out)]
    assert left[1] < 0.97 * left[0]


def test_states_do_not_compare(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set weights.hidden and weights.relations to 0"):
        run_recipe(recipe(*pair, tmp_path / "out", weights={"hidden": 1.0}))
