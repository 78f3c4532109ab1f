"""A real Triton server with two towers: the bits of this process, whatever the company; bad images; the front."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from penjing.core.artifact.towers import load_embedder
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.imports.importer import import_model
from penjing.core.vision.embedder import Embedder
from penjing.serve.client.client import AsyncClient, Client
from penjing.serve.supervisor.export import export_repository
from tests.core.vision.paired import SIDE, write_paired
from tests.serve.front.asking import Fronted
from tests.serve.triton.classifiers import ServedClassifier, serving_classifier

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("triton")]
TEXTS = ["a cat", "the drawing of a dog", "x", "many letters that are cut", "again"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("towers")
    write_paired(path / "source", "clip")
    return import_model(str(path / "source"), path / "clip")


@pytest.fixture(scope="module")
def local(folder: Path) -> Embedder:
    return load_embedder(folder)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ServedClassifier]:
    with serving_classifier(
        folder, front={"limits": {"max_prompts": 16}}, max_batch_size=16, max_image_pixels=10_000, threads=2
    ) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: ServedClassifier) -> Iterator[Client]:
    with Client(served.address, model="towers") as made:
        yield made


def picture(seed: int, size: tuple[int, int] = (20, 24), form: str = "PNG") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, form)
    return file.getvalue()


def test_vectors_have_the_bits_of_this_process(client: Client, local: Embedder, served: ServedClassifier) -> None:
    assert client.is_ready()
    with Client(served.address) as unnamed:
        assert unnamed.is_ready()
    files = [picture(0), picture(1, (40, 17)), picture(2, form="JPEG")]
    pixels = np.random.default_rng(3).integers(0, 256, (4, 3, SIDE, SIDE), np.uint8)
    assert np.array_equal(client.embed(TEXTS), local.embed_texts(TEXTS))
    assert np.array_equal(client.embed_images(files), local.embed_images(files))
    assert np.array_equal(client.embed_images(files[0]), local.embed_images(files[:1]))
    assert np.array_equal(client.embed_images(pixels), local.embed_images(pixels))
    np.testing.assert_allclose(np.linalg.norm(client.embed_images(files), axis=1), 1, atol=1e-6)

    async def ask() -> tuple[np.ndarray, np.ndarray]:
        async with AsyncClient(served.address, model="towers") as made:
            return await made.embed(TEXTS[0]), await made.embed_images(files[0])

    text, image = asyncio.run(ask())
    assert np.array_equal(text[0], local.embed_texts(TEXTS)[0])
    assert np.array_equal(image[0], local.embed_images(files)[0])


def test_company_changes_no_bit(client: Client, local: Embedder) -> None:
    texts = [f"{TEXTS[index % 5]} {index}" for index in range(24)]
    files = [picture(index) for index in range(24)]
    with ThreadPoolExecutor(8) as pool:
        one = pool.map(lambda text: client.embed(text)[0], texts)
        other = pool.map(lambda file: client.embed_images(file)[0], files)
        assert np.array_equal(np.stack(list(one)), local.embed_texts(texts))
        assert np.array_equal(np.stack(list(other)), local.embed_images(files))


def test_bad_requests_are_their_own(client: Client, local: Embedder) -> None:
    good = picture(0)
    for bad, message in (
        ([good, b"no image"], r"image 1 of the request cannot be read: it is no JPEG or PNG"),
        ([good[:-40]], "it is a broken image"),
        ([picture(0, (200, 200))], r"40000 pixels|200 x 200 pixels"),
        ([], "images must be"),
        (np.zeros((1, 3, SIDE, SIDE), np.float32), "images must be"),
        (np.zeros((1, 1, SIDE, SIDE), np.uint8), "pixels"),
        ([good] * 17, "max_batch_size"),
    ):
        with pytest.raises(RequestError, match=message):
            client.embed_images(bad)
    for inputs, message in (
        ({"text": [b"a"], "image": [good]}, "give one of text, image, pixels, got text and image"),
        ({"text": [b"\xff"]}, r"text\[0\] is not UTF-8"),
    ):
        with pytest.raises(RequestError, match=message):
            client.infer(inputs)
    assert np.array_equal(client.embed_images(good), local.embed_images([good]))


def test_openais_path_gives_the_same(served: ServedClassifier, local: Embedder) -> None:
    front = Fronted(served)
    answer = front.ask("/v1/embeddings", {"model": "clip", "input": TEXTS, "dimensions": 20}).json
    found = np.array([entry["embedding"] for entry in answer["data"]], np.float32)
    assert np.array_equal(found, local.embed_texts(TEXTS))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, local.tokenizer.rows(TEXTS)))
    wrong = front.ask("/v1/embeddings", {"model": "clip", "input": "a", "dimensions": 24})
    assert (wrong.status, "clip has 20, not 24" in wrong.json["error"]["message"]) == (400, True)
    refused = front.ask("/v1/completions", {"model": "clip", "prompt": "a"})
    assert "ask it at /v1/embeddings" in refused.json["error"]["message"]


def test_openais_package_sends_images_beside_texts(served: ServedClassifier, local: Embedder) -> None:
    front, files = Fronted(served), [picture(index, form="JPEG" if index % 2 else "PNG") for index in range(20)]

    def part(file: bytes, form: str = "jpeg") -> Any:
        return {
            "type": "image_url",
            "image_url": {"url": f"data:image/{form};base64,{base64.b64encode(file).decode()}"},
        }

    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        mixed: Any = [TEXTS[0], part(files[0]), {"type": "text", "text": TEXTS[1]}, part(files[1])]
        answer = client.embeddings.create(model="clip", input=mixed)
        found = np.array([entry.embedding for entry in answer.data], np.float32)
        assert np.array_equal(found[[0, 2]], local.embed_texts(TEXTS[:2]))
        assert np.array_equal(found[[1, 3]], local.embed_images(files[:2]))
        texts = sum(map(len, local.tokenizer.rows(TEXTS[:2])))
        assert answer.usage.prompt_tokens == texts + 2 * -(-SIDE * SIDE // 256)
        one: Any = part(files[2])
        alone = client.embeddings.create(model="clip", input=one)
        assert np.array_equal(np.array(alone.data[0].embedding, np.float32), local.embed_images(files[2:3])[0])
    for given, words in (
        ([part(b"no image")], "no JPEG or PNG"),
        (["a", part(files[0][:-40])], "broken image"),
        ([part(files[0], "gif")], "addresses are not fetched"),
        ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "addresses are not fetched"),
        ([part(file) for file in files], "1 to 16 texts or images, not 20"),
        ([{"type": "input_audio"}], "input_audio"),
    ):
        refused = front.ask("/v1/embeddings", {"model": "clip", "input": given})
        assert refused.status == 400
        assert words in refused.error["message"]
    large = front.ask("/v1/embeddings", {"model": "clip", "input": part(picture(0, (90, 110)) + bytes(2 << 20))})
    assert large.status == 200, "a body with images may have more than a megabyte"


def test_a_repository_is_exported_and_damage_refused(folder: Path, tmp_path: Path) -> None:
    made = export_repository(folder, tmp_path / "models")
    text = (made / "config.pbtxt").read_text()
    assert 'name: "image" data_type: TYPE_STRING dims: [ 1 ] optional: true' in text
    assert (made / "1" / "artifact" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="leave --form out or take python"):
        export_repository(folder, tmp_path / "onnx", "onnxruntime")
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json"):
        export_repository(tmp_path / "damaged", tmp_path / "none")
