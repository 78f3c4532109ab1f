"""Weights that a served decoder takes from where it is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, UnavailableError
from penjing.serve.client.protocol import ENGINE_VARIABLE, MODEL_VARIABLE, weights_digest
from penjing.serve.client.weights import send_weights
from penjing.serve.engine.config import EngineConfig
from penjing.serve.families.decoder import FAMILY
from penjing.serve.runner.load import check_taking, make_engine
from penjing.serve.triton.pulse import Pulse
from penjing.train.align import served
from penjing.train.align.served import ServerSampler, check_servers
from penjing.train.processes.world import World
from tests.serve.tiny import tiny_model
from tests.serve.triton.stand_in import GREEDY, Adapted, request

SAMPLING = {"max_tokens": 12, "logprobs": 0, **GREEDY}


@pytest.fixture
def taking(tiny_long: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(MODEL_VARIABLE, str(tiny_long))
    monkeypatch.setenv(ENGINE_VARIABLE, '{"num_blocks": 256, "take_weights": true}')
    adapted = Adapted(Pulse())
    yield adapted
    adapted.adapter.finalize()


def weights(folder: Path) -> dict[str, np.ndarray]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def asker(adapted: Adapted) -> Callable[[Any, np.ndarray | None], str]:
    def ask(asked: Any, values: np.ndarray | None) -> str:
        inputs = {} if values is None else {"weights": values}
        sender = adapted.ask(parameters={"weights": json.dumps(asked)}, **inputs)
        assert sender.done.wait(60)
        if sender.error() is not None:
            raise ValueError(str(sender.error()))
        return sender.text()

    return ask


def answer(adapted: Adapted, **parameters: Any) -> tuple[str, str]:
    sender = adapted.ask(
        text_input="a tree in a pot stands", sampling_parameters=SAMPLING, return_logprobs=True, parameters=parameters
    )
    assert sender.done.wait(60)
    if sender.error() is not None:
        return "", str(sender.error())
    return sender.text(), sender.responses[-1].tensors["logprobs"][0].decode()


def test_answers_are_of_the_weights_that_were_sent(
    taking: Adapted, other: Path, tiny_long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answer(taking)
    digest = send_weights(asker(taking), weights(other))
    sent = answer(taking)
    monkeypatch.setenv(MODEL_VARIABLE, str(other))
    monkeypatch.setenv(ENGINE_VARIABLE, '{"num_blocks": 256}')
    loaded = Adapted(Pulse())
    try:
        assert sent == answer(loaded) != before
    finally:
        loaded.adapter.finalize()
    assert answer(taking, of_weights=digest) == sent
    back = send_weights(asker(taking), weights(tiny_long))  # no prefix of the other weights is left either
    assert answer(taking, of_weights=back) == before
    assert "of_weights: this server has other weights" in answer(taking, of_weights=digest)[1]


def test_only_what_differs_is_sent(taking: Adapted, tiny_long: Path) -> None:
    ask, asked = asker(taking), []

    def noted(what: Any, values: np.ndarray | None) -> str:
        asked.append(what if values is None else what["name"])
        return ask(what, values)

    tensors = weights(tiny_long)
    first = send_weights(noted, tensors)
    assert asked == ["list", {"take": first}]
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    assert send_weights(noted, tensors) != first
    assert asked[2:4] == ["list", "model.norm.weight"]
    assert len(asked) == 5


def test_no_answer_is_given_while_weights_are_missing(taking: Adapted, tiny_long: Path) -> None:
    ask, before = asker(taking), answer(taking)
    name, tensor = "model.norm.weight", weights(tiny_long)["model.norm.weight"]
    ask({"name": name, "begin": 0}, tensor[:3] + 1)
    assert "its weights are being replaced" in answer(taking)[1]
    sender = taking.ask(parameters={"ping": True})
    assert "its weights are being replaced" in str(sender.error())
    digests = {each: hashlib.sha256(values.data).hexdigest() for each, values in weights(tiny_long).items()}
    with pytest.raises(ValueError, match=f"1 tensor came in part, such as {name}"):
        ask({"take": weights_digest(digests)}, None)
    # Who sends anew repairs it.
    assert answer(taking, of_weights=send_weights(ask, weights(tiny_long))) == before


def test_weights_wait_for_answers(taking: Adapted, other: Path) -> None:
    before = asker(taking)("list", None)
    asked = request(text_input="a", sampling_parameters={"max_tokens": 3000, **GREEDY})
    taking.adapter.execute([asked])
    with pytest.raises(ValueError, match="1 requests are unanswered; retry in 1 s"):
        send_weights(asker(taking), weights(other))
    assert asker(taking)("list", None) == before  # what was refused has changed nothing
    asked.sender.cancelled = True
    assert asked.sender.done.wait(60)
    assert answer(taking, of_weights=send_weights(asker(taking), weights(other)))[0]


@pytest.mark.parametrize(
    ("asked", "values", "words"),
    [
        ("all", None, 'ask for "list" or'),
        ([], None, 'ask for "list" or'),
        ({"name": "lm"}, np.zeros(1, np.float32), "begin: Field required"),
        ({"name": "lm", "begin": -1}, np.zeros(1, np.float32), "begin: Input should be greater"),
        ({"name": "../lm", "begin": 0}, np.zeros(1, np.float32), "there is no tensor '../lm'"),
        ({"name": "model.norm.weight", "begin": 0}, np.zeros(10_000, np.float32), "values, and 10000 came"),
        ({"name": "model.norm.weight", "begin": 5}, np.zeros(1, np.float32), "does not follow what came before"),
        ({"name": "model.norm.weight", "begin": 0}, np.zeros(1, np.float64), "must be a TYPE_FP32 tensor"),
        ({"name": "model.norm.weight", "begin": 0}, np.zeros((1, 1), np.float32), "of one dimension"),
        ({"take": "0"}, None, "what is there has the digest"),
        ({"take": None}, None, "what is there has the digest"),
    ],
)
def test_what_is_wrong_changes_nothing(taking: Adapted, asked: Any, values: np.ndarray | None, words: str) -> None:
    before = answer(taking)
    with pytest.raises(ValueError, match=r"INVALID_ARGUMENT: .*weights") as caught:
        asker(taking)(asked, values)
    assert words in str(caught.value)
    assert answer(taking) == before


def test_other_models_are_told_apart(taking: Adapted, tiny_long: Path) -> None:
    tensors = weights(tiny_long)
    for wrong in (
        {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"},
        tensors | {"model.norm.weight": np.zeros(5, np.float32)},
        tensors | {"model.norm.weight": tensors["model.norm.weight"].astype(np.float64)},
    ):
        with pytest.raises(Exception, match=r"(the served model is another one|float32).*model\.norm\.weight"):
            send_weights(asker(taking), wrong)


def test_a_server_takes_no_weights_unless_it_is_told_to(adapted: Adapted, tiny_long: Path) -> None:
    with pytest.raises(ValueError, match="start it with --set take_weights=true"):
        send_weights(asker(adapted), weights(tiny_long))
    assert "start it with --set take_weights=true" in answer(adapted, of_weights="0")[1]


def test_weights_that_cannot_be_replaced_are_told_before_anything_is_served(tiny_long: Path) -> None:
    takes = EngineConfig(take_weights=True, num_blocks=8)
    with pytest.raises(ConfigError, match="take_weights is for a checkpoint in floating point"):
        make_engine(tiny_model(int8=True), takes)
    with pytest.raises(ConfigError, match="take_weights is for a CPU so far; take device=cpu"):
        check_taking(takes.model_copy(update={"device": "cuda"}), is_quantized=False)
    with pytest.raises(ValueError, match="tensor_parallel=2 does not go with take_weights"):
        EngineConfig(take_weights=True, tensor_parallel=2)
    with pytest.raises(ConfigError, match="a model repository takes no weights so far"):
        FAMILY.entry(tiny_long, takes, None)


def test_a_run_whose_server_stays_away_says_how_it_goes_on(tiny_long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "RETRIES", 0)
    loaded = load_model(tiny_long)
    sampler = ServerSampler(loaded.model, loaded.config, ["127.0.0.1:9"], World(rank=0, size=1), None)
    with pytest.raises(UnavailableError, match=r"no server answers at .*take_weights=true; go on with --resume auto"):
        sampler.refresh()
    with pytest.raises(UnavailableError, match=r"no server answers at .*take_weights=true$"):
        check_servers(["127.0.0.1:9"], loaded.config)
