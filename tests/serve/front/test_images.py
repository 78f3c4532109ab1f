"""Images through Triton server and OpenAI's own package: bit by bit what the engine says in this process."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penjing.core.errors import RequestError
from penjing.serve.client.chat import chat
from penjing.serve.client.client import Client
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.serve.front.asking import Fronted
from tests.serve.seeing import TOKEN, encoded, picture, write_seeing
from tests.serve.tiny import run_all, text_of
from tests.serve.triton.serving import serving

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("sight")]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
SAMPLING: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    write_seeing(made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def front(folder: Path) -> Iterator[Fronted]:
    with serving(folder, {"max_images": 2}, front={"limits": {}}) as served:
        yield Fronted(served)


def alone(folder: Path, prompt: str, *images: bytes) -> tuple[str, list[float]]:
    engine = load_engine(folder, EngineConfig(num_blocks=512, max_images=2))
    request = Request("0", prompt, SamplingParams(**SAMPLING), images=images)
    (outputs,) = run_all(engine, [request]).values()
    entries = [entry for output in outputs for entry in output.logprobs or []]
    return text_of(outputs), [next(iter(entry.values())).logprob for entry in entries]


def test_what_is_served_are_the_bits_of_this_process(front: Fronted, folder: Path) -> None:
    first, second = encoded(picture(1)), encoded(picture(2, (40, 30)), "JPEG")
    prompt = f"{TOKEN}and {TOKEN}"
    wanted = alone(folder, prompt, first, second)
    with front.served.client() as client:
        for images in ([first, second], [base64.b64encode(first), base64.b64encode(second)]):
            found = client.generate(prompt, images=images, **SAMPLING)
            assert found.text == wanted[0]
            assert [next(iter(entry.values()))["logprob"] for entry in found.logprobs] == wanted[1]
        parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
        chat = client.generate(messages=[{"role": "user", "content": parts}], images=[first], **SAMPLING)
        assert chat.text == alone(folder, f"user:{TOKEN}what?\n", first)[0]
        for prompt, images, words in (
            ("a", [first], "stands 0 times"),
            (TOKEN, [], "0 images came with it"),
            (TOKEN, [b"no image at all"], "neither a JPEG or PNG file nor one in base64"),
            (TOKEN, [first[:100]], "broken image"),
            (TOKEN * 3, [first] * 3, "at most 2"),
        ):
            with pytest.raises(RequestError, match=words):
                client.generate(prompt, images=images, **SAMPLING)


def image_part(data: bytes, form: str = "png") -> Any:
    return {"type": "image_url", "image_url": {"url": f"data:image/{form};base64,{base64.b64encode(data).decode()}"}}


def test_openais_package_sends_images(front: Fronted, folder: Path) -> None:
    first = encoded(picture(1))
    greedy: Any = {"model": "llm", "max_tokens": 8, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        content: Any = [{"type": "text", "text": "see "}, image_part(first), {"type": "text", "text": "?"}]
        answer = client.chat.completions.create(messages=[{"role": "user", "content": content}], **greedy)
        assert answer.choices[0].message.content == alone(folder, f"user:see {TOKEN}?\n", first)[0]
        stream = client.chat.completions.create(messages=[{"role": "user", "content": content}], stream=True, **greedy)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
        remote: Any = {"type": "image_url", "image_url": {"url": "https://example.org/photo.jpg"}}
        for role, part, words in (
            ("user", remote, "addresses are not fetched"),
            ("user", image_part(first, "gif"), "addresses are not fetched"),
            ("user", image_part(first[:90]), "broken image"),
            ("system", image_part(first), "images are a user's"),
            ("user", {"type": "input_audio"}, "content"),
        ):
            messages: Any = [{"role": role, "content": [part]}]
            with pytest.raises(openai.BadRequestError, match=words):
                client.chat.completions.create(messages=messages, **greedy)


def test_other_dialects_send_images_in_their_own_words(front: Fronted, folder: Path) -> None:
    first = encoded(picture(1))
    data = base64.b64encode(first).decode()
    wanted = alone(folder, f"user:see {TOKEN}?\n", first)[0]
    greedy = {"model": "llm", "temperature": 0.0, "ignore_eos": True}
    image: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": data}

    def blocks(source: Any, role: str = "user") -> Any:
        content = [{"type": "text", "text": "see "}, {"type": "image", "source": source}, {"type": "text", "text": "?"}]
        return greedy | {"max_tokens": 8, "messages": [{"role": role, "content": content}]}

    answer = front.ask("/v1/messages", blocks(image))
    assert answer.json["content"] == [{"type": "text", "text": wanted}]
    for body, words in (
        (blocks(image | {"data": data[:50]}), "neither a JPEG|broken"),
        (blocks(image | {"media_type": "image/gif"}), "media_type"),
        (blocks({"type": "url", "url": "https://example.org/a.png"}), "source"),
        (blocks(image, "assistant"), "no image is in a message of assistant"),
    ):
        refused = front.ask("/v1/messages", body)
        assert refused.status == 400
        assert re.search(words, refused.json["error"]["message"])
    counted = front.ask("/v1/messages/count_tokens", {"model": "llm", "messages": blocks(image)["messages"]})
    assert "not counted" in counted.json["error"]["message"]

    def items(url: Any, role: str = "user") -> Any:
        see, what = ({"type": "input_text", "text": text} for text in ("see ", "?"))
        content = [see, {"type": "input_image", "image_url": url}, what]
        return greedy | {"max_output_tokens": 8, "input": [{"role": role, "content": content}]}

    found = front.ask("/v1/responses", items(f"data:image/png;base64,{data}")).json
    assert found["output"][0]["content"][0]["text"] == wanted
    for body, words in (
        (items("https://example.org/a.png"), "not fetched"),
        (items(None), "image_url"),
        (items(f"data:image/png;base64,{data}", "system"), "images are a user's"),
    ):
        refused = front.ask("/v1/responses", body)
        assert refused.status == 400
        assert re.search(words, refused.json["error"]["message"])


def test_a_photo_of_megabytes_fits_a_body(front: Fronted) -> None:
    large = encoded(picture(3, (900, 900)))  # 2.4 MB of noise
    assert len(large) > 2 << 20
    asked = {"model": "llm", "max_tokens": 1, "messages": [{"role": "user", "content": [image_part(large)]}]}
    answer = front.ask("/v1/chat/completions", asked)
    assert answer.status == 200, answer.body


def test_a_model_without_eyes_refuses_images(tiny_checkpoint: Path) -> None:
    engine = load_engine(tiny_checkpoint, EngineConfig(num_blocks=64))
    with pytest.raises(RequestError, match="takes no images"):
        engine.add(Request("0", "a", images=[encoded(picture())]))


def test_a_chat_in_the_terminal_is_about_its_images(front: Fronted, folder: Path) -> None:
    first, sink = encoded(picture(1)), io.StringIO()
    lines = io.StringIO("what?\nand?\n/reset\nwhat?\n")
    chat(front.served.address, max_tokens=2, temperature=0.0, images=[first], source=lines, sink=sink)
    with front.served.client() as client:
        asked: Any = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
        sampling: dict[str, Any] = {"images": [first], "max_tokens": 2, "temperature": 0.0}
        one = client.generate(messages=asked, **sampling).text
        asked += [{"role": "assistant", "content": one}, {"role": "user", "content": "and?"}]
        two = client.generate(messages=asked, **sampling).text
    assert sink.getvalue() == f"{one}\n{two}\n{one}\n"


def test_clients_give_no_image_where_there_is_none(front: Fronted) -> None:
    with Client(front.served.address) as client:
        assert client.generate("plain", **SAMPLING).num_output_tokens == 8
