"""What a decoder's artifact stores in its parity record, and how continuations are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.core.artifact.decoder import (
    INT8_RUNTIME,
    LAYER_OUTPUTS,
    Answer,
    Prompt,
    answers_to_record,
    logprob_difference,
    open_decoder_artifact,
    prompts_to_record,
    recorded_answers,
    recorded_prompts,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Bound, Parity, read_parity, write_parity
from penjing.core.errors import InputError

PROMPTS = (Prompt(text="é\n", token_ids=(1,)), Prompt(text="b", token_ids=(2,)))


def answer(*tokens: int, logprob: float = -1.0) -> Answer:
    return Answer(token_ids=tokens, logprobs=(logprob,) * len(tokens))


ANSWERS = (answer(1, 2, 3), answer(4, 5, 6))


@pytest.fixture
def parity() -> Parity:
    return Parity(
        family="decoder",
        inputs=prompts_to_record(PROMPTS),
        outputs={INT8_RUNTIME: answers_to_record(ANSWERS)},
        differences=(),
        bound=Bound(between=(FAKE_QUANTIZED, INT8_RUNTIME), quantity=LAYER_OUTPUTS, statistic="mean", value=0.05),
    )


def test_prompts_and_answers_read_back_as_written(parity: Parity, tmp_path: Path) -> None:
    write_parity(tmp_path, parity)
    read = read_parity(tmp_path)
    assert recorded_prompts(read) == PROMPTS
    assert recorded_answers(read, INT8_RUNTIME) == ANSWERS


def test_damaged_and_unknown_parts_are_named(parity: Parity) -> None:
    with pytest.raises(InputError, match=r"parity\.json: prompts: .*the file is damaged"):
        recorded_prompts(parity.model_copy(update={"inputs": {"prompts": []}}))
    with pytest.raises(InputError, match=r"parity\.json: answers: .*the file is damaged"):
        recorded_answers(parity, "another")


def test_continuations_are_compared_as_far_as_they_are_the_same() -> None:
    difference = logprob_difference((INT8_RUNTIME, "x"), ANSWERS, (answer(1, 2, 3), answer(4, 9, 6, logprob=-1.5)))
    assert difference.between == (INT8_RUNTIME, "x")
    assert difference.num_values == 4  # all three of the first prompt, one of the second before they part
    assert difference.largest == 0.5
    assert difference.mean == pytest.approx(0.125)
    assert difference.same == pytest.approx(4 / 6)


def test_answers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="x gave 1 answers where int8_runtime gave 2"):
        logprob_difference((INT8_RUNTIME, "x"), ANSWERS, (answer(1),))


def test_nothing_to_compare_is_no_difference() -> None:
    difference = logprob_difference(("a", "b"), (answer(1),), (answer(2),))
    assert (difference.num_values, difference.largest, difference.same) == (0, 0.0, 0.0)


def test_a_checkpoint_is_not_an_artifact(tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="is not an artifact; 'penjing compress' makes one"):
        open_decoder_artifact(tiny_checkpoint)
