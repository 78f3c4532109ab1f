"""The parity record: written by compression, completed by whoever serves the artifact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.core.artifact.decoder import (
    INT8_RUNTIME,
    SERVED,
    Parity,
    ParityOutput,
    add_parity_outputs,
    logprob_difference,
    open_artifact,
    read_parity,
)
from penjing.core.errors import InputError
from penjing.core.manifest import write_manifest


def output(*tokens: int, logprob: float = -1.0) -> ParityOutput:
    return ParityOutput(token_ids=tokens, logprobs=(logprob,) * len(tokens))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    parity = {
        "inputs": [{"text": "a", "token_ids": [1]}, {"text": "b", "token_ids": [2]}],
        "outputs": {INT8_RUNTIME: [output(1, 2, 3).model_dump(), output(4, 5, 6).model_dump()]},
        "differences": [],
    }
    (tmp_path / "parity.json").write_text(json.dumps(parity))
    write_manifest(tmp_path, "artifact", {"command": "tests"})
    return tmp_path


def test_an_endpoint_is_added_beside_the_hashed_record(artifact: Path) -> None:
    hashed = (artifact / "parity.json").read_bytes()
    difference = add_parity_outputs(artifact, SERVED, [output(1, 2, 3), output(4, 9, 6, logprob=-1.5)])
    assert (artifact / "parity.json").read_bytes() == hashed
    assert difference.between == (INT8_RUNTIME, SERVED)
    assert difference.num_values == 4  # all three of the first prompt, one of the second before they part
    assert difference.largest == 0.5
    assert difference.mean == pytest.approx(0.125)
    assert difference.same_tokens == pytest.approx(4 / 6)
    parity = read_parity(artifact)
    assert set(parity.outputs) == {INT8_RUNTIME, SERVED}
    assert parity.differences == (difference,)


def test_adding_again_replaces(artifact: Path) -> None:
    add_parity_outputs(artifact, SERVED, [output(7), output(8)])
    add_parity_outputs(artifact, SERVED, [output(1, 2, 3), output(4, 5, 6)])
    parity = read_parity(artifact)
    assert [difference.largest for difference in parity.differences] == [0.0]
    assert parity.differences[0].same_tokens == 1.0


def test_outputs_that_do_not_fit_the_inputs_are_refused(artifact: Path) -> None:
    with pytest.raises(InputError, match="gave 1 outputs for the 2 inputs"):
        add_parity_outputs(artifact, SERVED, [output(1)])


def test_nothing_to_compare_is_no_difference() -> None:
    difference = logprob_difference(("a", "b"), (output(1),), (output(2),))
    assert (difference.num_values, difference.largest, difference.same_tokens) == (0, 0.0, 0.0)


def test_a_damaged_record_is_named(artifact: Path) -> None:
    (artifact / "parity.json").write_text('{"inputs": [], "outputs": {}, "differences": []}')
    with pytest.raises(InputError, match=r"parity.json: inputs: .*the file is damaged"):
        read_parity(artifact)


def test_the_record_reads_back_as_written() -> None:
    parity = Parity.model_validate(
        {
            "inputs": [{"text": "é\n", "token_ids": [5]}],
            "outputs": {"x": [output(1).model_dump()]},
            "differences": [
                {"between": ["x", "y"], "quantity": "logits", "num_values": 1, "largest": 0.1, "mean": 0.1}
            ],
        }
    )
    assert Parity.model_validate_json(parity.model_dump_json()) == parity


def test_a_checkpoint_is_not_an_artifact(tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="is not an artifact; 'penjing compress' makes one"):
        open_artifact(tiny_checkpoint)
