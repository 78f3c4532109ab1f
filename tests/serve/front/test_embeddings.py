"""`/v1/embeddings` of a real server with a small INT8 text encoder: OpenAI's own package gets gRPC's bits."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from penjing.core.artifact.onnx_encoder import EncoderArtifact
from penjing.serve.access.keys import add_key
from penjing.serve.client.client import Client
from tests.serve.front.asking import Fronted
from tests.serve.triton.classifiers import serving_classifier

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
PATH = "/v1/embeddings"
TEXTS = ["the value of a list", "python", "it returns the name of the class " * 3, "objets d'été ✓", "on to it"]
ROWS = 4
PER_MINUTE = 500
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def secrets(artifact: EncoderArtifact) -> dict[str, str]:
    file = artifact.folder.parent / "keys.toml"
    return {"free": add_key(file, "free", {}), "slow": add_key(file, "slow", {"tokens_per_minute": PER_MINUTE})}


@pytest.fixture(scope="module")
def encoder(artifact: EncoderArtifact, secrets: dict[str, str]) -> Iterator[Fronted]:
    front = {
        "keys": str(artifact.folder.parent / "keys.toml"),
        "limits": {"max_prompts": 16, "max_body_bytes": 4 << 20},
    }
    with serving_classifier(artifact.folder, front=front, max_batch_size=ROWS, threads=1) as served:
        yield Fronted(served)


@pytest.fixture(scope="module")
def client(encoder: Fronted, secrets: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{encoder.url}/v1", api_key=secrets["free"], max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def grpc(encoder: Fronted) -> Iterator[Client]:
    with encoder.served.client() as made:
        yield made


@pytest.fixture
def ask(encoder: Fronted, secrets: dict[str, str]) -> Any:
    def asked(content: Any, path: str = PATH, key: str = "free") -> Any:
        return encoder.ask(path, content, headers={"authorization": f"Bearer {secrets[key]}"})

    return asked


def test_openais_package_gets_grpcs_bits(client: openai.OpenAI, grpc: Client, artifact: EncoderArtifact) -> None:
    texts = TEXTS[:ROWS]
    expected = grpc.embed(texts)
    assert [model.id for model in client.models.list()] == ["small-int8"]
    for options in ({}, {"encoding_format": "float"}, {"dimensions": 32, "user": "me"}):
        found = client.embeddings.create(model="small-int8", input=texts, **options)  # type: ignore[arg-type]
        rows = np.array([entry.embedding for entry in found.data])
        assert np.array_equal(rows.astype(np.float32), expected)
        assert np.array_equal(rows, expected)  # numbers of JSON are no nearer than float32, and no farther
        assert [entry.index for entry in found.data] == list(range(ROWS))
        tokens = sum(map(len, artifact.tokenizer.rows(texts)))
        assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (tokens, tokens, "small-int8")
    one = client.embeddings.create(model="encoder", input=texts[2])
    assert np.array_equal(np.array(one.data[0].embedding, np.float32), grpc.embed(texts[2])[0])


def test_base64_is_of_float32(ask: Any, grpc: Client) -> None:
    answer = ask({"model": "encoder", "input": TEXTS[0], "encoding_format": "base64"}).json
    assert answer["object"] == "list"
    row = base64.b64decode(answer["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(row, "<f4"), grpc.embed(TEXTS[0])[0])


def test_more_texts_than_the_model_takes_at_once(client: openai.OpenAI, grpc: Client) -> None:
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]
    found = client.embeddings.create(model="encoder", input=texts)
    expected = np.concatenate([grpc.embed(texts[at : at + ROWS]) for at in range(0, len(texts), ROWS)])
    assert np.array_equal(np.array([entry.embedding for entry in found.data], np.float32), expected)


def test_token_ids_are_the_models_own(client: openai.OpenAI, grpc: Client, artifact: EncoderArtifact) -> None:
    ids = artifact.tokenizer.rows(TEXTS)
    found = client.embeddings.create(model="encoder", input=ids)
    expected = client.embeddings.create(model="encoder", input=TEXTS)
    assert [entry.embedding for entry in found.data] == [entry.embedding for entry in expected.data]
    assert found.usage == expected.usage
    one = client.embeddings.create(model="encoder", input=ids[1])
    assert np.array_equal(np.array(one.data[0].embedding, np.float32), grpc.embed(TEXTS[1])[0])


def test_token_ids_are_of_a_text_that_may_be_sent(ask: Any, artifact: EncoderArtifact) -> None:
    marks, one = artifact.tokenizer.rows(["", "python"])
    before, behind = one[:1], one[-1:]
    many = [*before, *one[1:-1] * ((1 << 20) // 4), *behind]
    for ids, message in ((marks, "text 1 is empty."), (many, "at most 1048576 are read; shorten it.")):
        answer = ask({"model": "encoder", "input": [one, ids]})
        assert (answer.status, answer.error["param"]) == (400, "input")
        assert message in answer.error["message"]


@pytest.mark.parametrize(
    ("changes", "param", "message"),
    [
        ({"input": ""}, "input", "text 0 is empty"),
        ({"input": ["a", ""]}, "input", "text 1 is empty"),
        ({"input": []}, "input", "1 to 16 texts or images, not 0"),
        ({"input": ["a"] * 17}, "input", "1 to 16 texts or images, not 17"),
        ({"input": ["a", "é" * (600 << 10)]}, "input", "text 1 has 1228800 bytes"),
        ({"input": 5}, "input", "valid string"),
        ({"input": None}, "input", "valid string"),
        ({"input": [1, 2]}, "input", "token ids 0 are not those that small-int8's own tokenizer writes for a text"),
        ({"input": [[9906, 1917]]}, "input", "check_embedding_ctx_length=False"),
        ({"input": [[]]}, "input", "text 0 is empty"),
        ({"input": [[1, -2]]}, "input.0.1", "greater than or equal to 0"),
        ({"input": ["a", 1]}, "input.1", "valid string"),
        ({"input": {"text": "a"}}, "input.type", "missing"),
        ({"input": [PICTURE]}, "input", "0 is an image, and small-int8 reads texts alone"),
        ({"encoding_format": "int8"}, "encoding_format", "float"),
        ({"dimensions": 16}, "dimensions", "has 32, not 16"),
        ({"dimensions": "32"}, "dimensions", "valid integer"),
        ({"user": 5}, "user", "valid string"),
        ({"inputs": "a"}, "inputs", "no field"),
    ],
)
def test_wrong_fields(ask: Any, changes: dict[str, Any], param: str, message: str) -> None:
    good = {"model": "encoder", "input": "a"}
    answer = ask(good | changes)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
    assert ask(good).status == 200


def test_a_long_text_is_cut_as_over_grpc(ask: Any, grpc: Client, artifact: EncoderArtifact) -> None:
    text = "class " * 5000
    answer = ask({"model": "encoder", "input": text}).json
    assert answer["usage"]["prompt_tokens"] == artifact.tokenizer.max_tokens
    assert np.array_equal(np.array(answer["data"][0]["embedding"], np.float32), grpc.embed(text)[0])


def test_another_kind_says_where_it_is_asked(ask: Any, front: Fronted) -> None:
    bodies = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/tokenize": {"prompt": "a"},
    }
    for path, body in bodies.items():
        answer = ask({"model": "small-int8"} | body, path)
        assert (answer.status, answer.error["code"]) == (400, "wrong_model")
        assert answer.error["message"] == "small-int8 writes no text; ask it at /v1/embeddings."
    answer = front.ask(PATH, {"model": "llm", "input": "a"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "wrong_model", "model")
    assert "ask it at /v1/chat/completions" in answer.error["message"]
    assert ask({"model": "none", "input": "a"}).status == 404


def test_health_and_keys(encoder: Fronted, ask: Any) -> None:
    assert encoder.ask("/health/ready").json == {"status": "ready"}
    assert encoder.ask(PATH, {"model": "encoder", "input": "a"}).status == 401
    assert encoder.ask(PATH, method="GET").status == 401
    texts = ["the name of the class " * 5] * 16
    paid = 0
    while paid < PER_MINUTE:
        answer = ask({"model": "encoder", "input": texts}, key="slow")
        assert answer.status == 200
        paid += answer.json["usage"]["total_tokens"]
    refused = ask({"model": "encoder", "input": "a"}, key="slow")
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) >= 1
