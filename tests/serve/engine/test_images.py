"""Images in the engine: greedy answers are transformers', whatever shares steps, caches and memory with them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import ConfigError, InputError, OverloadedError, RequestError
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.loop import EngineLoop
from penjing.serve.engine.prepare import PreparedRequest
from penjing.serve.engine.request import Request, RequestOutput
from penjing.serve.generate import generate_to_terminal
from penjing.serve.runner.load import load_engine, make_engine
from penjing.serve.runner.model_step import ModelStep
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sight.images import Images
from tests.serve.seeing import ROWS, SIDE, TOKEN, TOKEN_ID, encoded, picture, write_llava, write_seeing
from tests.serve.tiny import DEFAULTS, ids_of, run_all, tiny_engine

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("seeing")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return write_seeing(folder)


def engine_of(folder: Path, **settings: Any) -> LLMEngine:
    return load_engine(folder, EngineConfig.model_validate(DEFAULTS | settings))


def ask(number: int, prompt: str, *images: bytes, **params: Any) -> Request:
    return Request(str(number), prompt, SamplingParams(**(GREEDY | params)), images=images)


def seen(engine: LLMEngine, request: Request) -> PreparedRequest:
    """The request with its images, as it is queued."""
    return engine.preparer.see(engine.prepare(request))


def wanted(theirs: Any, prompt: str, seeds: list[int], count: int = 12) -> list[int]:
    """What transformers answers greedily; a picture has the model's size, so that no filter is compared."""
    ids: list[int] = []
    for place, part in enumerate(prompt.split(TOKEN)):
        ids += ([TOKEN_ID] * ROWS if place else []) + list(part.encode())
    pixels = np.stack([np.asarray(picture(seed)) for seed in seeds]).transpose(0, 3, 1, 2).astype(np.float32)
    values = torch.from_numpy((pixels / 255 - 0.5) / 0.5)[None]
    tokens = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            logits = theirs(input_ids=tokens, pixel_values=values).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None, None]], 1)
    return tokens[0, len(ids) :].tolist()


def test_greedy_answers_are_those_of_transformers(folder: Path, theirs: Any) -> None:
    cases = [(f"{TOKEN}what?", [1]), (f"two: {TOKEN}{TOKEN}", [1, 2]), (f"a{TOKEN}b{TOKEN}c", [3, 1])]
    requests = [
        ask(number, prompt, *(encoded(picture(seed)) for seed in seeds)) for number, (prompt, seeds) in enumerate(cases)
    ]
    engine = engine_of(folder)
    answers = run_all(engine, requests)
    for number, (prompt, seeds) in enumerate(cases):
        assert ids_of(answers[str(number), 0]) == wanted(theirs, prompt, seeds), prompt
    assert engine.preparer.images.num_computed == 3  # of five
    assert ids_of(answers["0", 0]) != ids_of(run_all(engine, [ask(9, cases[0][0], encoded(picture(2)))])["9", 0])


def test_greedy_answers_of_a_llava_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = write_llava(tmp_path)
    (outputs,) = run_all(engine_of(tmp_path), [ask(0, f"a{TOKEN}b", encoded(picture(1)))]).values()
    pixels = np.asarray(picture(1)).transpose(2, 0, 1).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in ([0.4, 0.45, 0.5], [0.2, 0.25, 0.3]))
    values = torch.from_numpy((pixels / 255 - mean) / std)[None]
    tokens = torch.tensor([[97, *[TOKEN_ID] * ROWS, 98]])
    with torch.no_grad():
        for _ in range(12):
            logits = theirs(input_ids=tokens, pixel_values=values).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None, None]], 1)
    assert ids_of(outputs) == tokens[0, 2 + ROWS :].tolist()


def test_the_models_own_layers_give_the_same(folder: Path, theirs: Any) -> None:
    engine = engine_of(folder)
    loaded = load_model(folder)
    engine.runner.fused, engine.runner.layers = None, ModelStep(loaded.model)  # type: ignore[attr-defined]
    (outputs,) = run_all(engine, [ask(0, f"a{TOKEN}b", encoded(picture(1)))]).values()
    assert ids_of(outputs) == wanted(theirs, f"a{TOKEN}b", [1])


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 4, "max_num_sequences": 4},  # chunks end within an image
        {"num_blocks": 24, "watermark": 0.0},  # less than four answers need: some are preempted
        {"enable_prefix_caching": False},
        {"image_cache_bytes": 0},
        {"speculate": "lookup"},
    ],
)
def test_chunks_preemption_and_caches_change_nothing(folder: Path, theirs: Any, settings: dict[str, Any]) -> None:
    prompts = [f"{TOKEN}first and a longer text", f"{TOKEN}first and a longer tex", "plain", f"x{TOKEN}y"]
    seeds = [1, 2, 0, 1]
    requests = [
        ask(number, prompt, *([encoded(picture(seed))] if TOKEN in prompt else []), max_tokens=20)
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    engine = engine_of(folder, **settings)
    answers = run_all(engine, requests)
    alone = engine_of(folder)
    for number, request in enumerate(requests):
        assert ids_of(answers[str(number), 0]) == ids_of(run_all(alone, [request])[str(number), 0])
    assert ids_of(answers["0", 0])[:12] == wanted(theirs, prompts[0], [1])
    if "num_blocks" in settings:
        assert engine.stats().num_preemptions > 0


def test_an_image_that_came_before_is_found_and_another_is_not(folder: Path) -> None:
    engine = engine_of(folder)
    prompt = f"{TOKEN}a prompt of some blocks"

    def cached(number: int, seed: int) -> tuple[int, list[int]]:
        (outputs,) = run_all(engine, [ask(number, prompt, encoded(picture(seed)))]).values()
        return outputs[0].num_cached_tokens, ids_of(outputs)

    first, second, again = cached(1, 1), cached(2, 2), cached(3, 1)
    assert first[0] == second[0] == 0  # equal tokens, other images
    assert again[0] >= 24
    assert again[1] == first[1] != second[1]
    assert engine.preparer.images.num_computed == 2


def test_forks_share_the_prompt_with_its_image(folder: Path) -> None:
    engine = engine_of(folder)
    params = {"n": 3, "temperature": 1.0, "seed": 3}
    together = run_all(engine, [ask(0, f"{TOKEN}what?", encoded(picture(1)), **params)])
    fresh = run_all(engine_of(folder), [ask(0, f"{TOKEN}what?", encoded(picture(1)), **params)])
    assert len(together) == 3
    assert {key: ids_of(value) for key, value in together.items()} == {k: ids_of(v) for k, v in fresh.items()}


def test_threads_that_see_one_image_compute_it_once(folder: Path) -> None:
    engine = engine_of(folder)
    found: list[Any] = []
    image = encoded(picture(5))
    threads = [threading.Thread(target=lambda: found.append(seen(engine, ask(0, TOKEN, image)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.preparer.images.num_computed == 1
    assert len({id(each.images[0].rows) for each in found}) == 1


def test_what_was_seen_is_forgotten_beyond_its_memory(folder: Path) -> None:
    loaded = load_model(folder)
    row_bytes = ROWS * 32 * 4
    images = Images(loaded.sight, loaded.tokenizer, EngineConfig(image_cache_bytes=2 * row_bytes))
    for seed in (1, 2, 1, 3, 1, 2):  # the third throws out the second
        image = [encoded(picture(seed))]
        images.see(images.places([TOKEN_ID] * ROWS, image), image)
    assert images.num_computed == 4


def test_a_turned_photo_is_seen_upright(folder: Path) -> None:
    engine = engine_of(folder)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise
    upright = picture(1)
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    (one,) = seen(engine, ask(0, TOKEN, encoded(upright))).images
    (other,) = seen(engine, ask(0, TOKEN, encoded(turned, exif=exif))).images
    assert one.digest == other.digest


def test_kinds_of_images(folder: Path) -> None:
    engine = engine_of(folder)
    flat = picture(1).resize((40, 20))
    sixteen = Image.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20) * 150)
    for data in (
        encoded(flat.convert("CMYK"), "JPEG"), encoded(sixteen), encoded(flat.convert("RGBA")),
        encoded(flat.convert("P")), encoded(flat.convert("1")), encoded(flat.convert("L"), "JPEG"),
    ):  # fmt: skip
        (one,) = seen(engine, ask(0, TOKEN, data)).images
        assert bool(one.rows.isfinite().all())


def test_bad_requests_name_what_is_wrong(folder: Path) -> None:
    engine = engine_of(folder, max_images=2, max_image_bytes=3000, max_image_pixels=10_000)
    good = encoded(picture(1))
    frames = encoded(picture(1), save_all=True, append_images=[picture(2)])
    for prompt, images, words in (
        (f"{TOKEN}{TOKEN}", [good], "stands 2 times in the prompt, and 1 image came with it"),
        ("a", [good], "stands 0 times"),
        (TOKEN, [], "stands 1 time in the prompt, and 0 images came with it"),
        (TOKEN * 3, [good] * 3, "at most 2 are taken"),
        (TOKEN, [b""], "image 0 cannot be read: it is no JPEG or PNG image"),
        (TOKEN, [good[:200]], "image 0 cannot be read: it is a broken image"),
        (TOKEN, [encoded(picture(1), "GIF")], "no JPEG or PNG"),
        (TOKEN, [frames], "animated"),
        (TOKEN, [b"x" * 3001], "3,001 bytes, at most 3,000 are read"),
        (TOKEN, [encoded(Image.new("1", (200, 100)))], "at most 10,000 are decoded"),
        ("a" * 252 + TOKEN, [good], "256 tokens"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.add(ask(0, prompt, *images))
    for ids in ([TOKEN_ID], [1] + [TOKEN_ID] * ROWS):
        with pytest.raises(RequestError, match="stands for an image"):
            engine.add(Request("0", ids))
    with pytest.raises(RequestError, match="not token ids"):
        engine.add(Request("0", [TOKEN_ID] * ROWS, images=[good]))
    assert not engine.has_work()
    (outputs,) = run_all(engine, [ask(0, TOKEN, good)]).values()
    assert outputs[-1].finish_reason == "length"


def test_a_model_without_eyes_says_so() -> None:
    with pytest.raises(RequestError, match="takes no images"):
        tiny_engine().add(Request("0", "<image>", images=[encoded(picture())]))
    outputs: list[RequestOutput] = run_all(tiny_engine(), [ask(0, "<image>")])["0", 0]
    assert outputs[-1].finish_reason == "length"  # an ordinary text to it


def test_images_of_a_request_that_is_refused_are_not_looked_at(folder: Path) -> None:
    image = encoded(picture(7))
    loop = EngineLoop(engine_of(folder, max_waiting_requests=2))  # not started: everything waits
    for number in range(2):
        loop.submit(ask(number, "text"), lambda outputs: None)
    with pytest.raises(OverloadedError, match="2 sequences wait"):
        loop.submit(ask(2, TOKEN, image), lambda outputs: None)
    with pytest.raises(RequestError, match="in use"):
        loop.submit(ask(0, TOKEN, image), lambda outputs: None)
    engine = loop.engine
    assert engine.preparer.images.num_computed == 0
    for number in range(2):
        engine.add(ask(number, "text"))
    with pytest.raises(OverloadedError, match="2 sequences wait"):
        engine.add(ask(2, TOKEN, image))
    assert engine.preparer.images.num_computed == 0


def test_idefics3_writes_tokens_around_an_image(tmp_path: Path) -> None:
    write_seeing(tmp_path, extra_tokens=("<fake_token_around_image>", "<global-img>"))
    prepared = seen(engine_of(tmp_path), ask(0, f"a{TOKEN}b", encoded(picture(1))))
    around, whole = 259, 260
    assert prepared.prompt_ids == [97, around, whole, *[TOKEN_ID] * ROWS, around, 98]
    assert prepared.images[0].start == 3


def with_squares(folder: Path, **extra: Any) -> Any:
    """A model whose images are cut into squares; transformers' own."""
    names = ["<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>"]
    theirs = write_seeing(folder, extra_tokens=tuple(names))
    values = {"do_image_splitting": True, "size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    (folder / "preprocessor_config.json").write_text(json.dumps(values | extra))
    return theirs


def test_a_large_image_is_seen_in_squares_and_whole_as_transformers_does(tmp_path: Path) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    theirs = with_squares(tmp_path, resample=3)
    photo, engine = picture(1, (3 * SIDE, 2 * SIDE)), engine_of(tmp_path)
    processor: Any = SmolVLMImageProcessorPil(
        size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}, resample=3,
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    said = processor([[photo, picture(2)]], return_row_col_info=True, return_tensors="pt")
    text = get_image_prompt_string(2, 2, ROWS, "<fake_token_around_image>", TOKEN, "<global-img>")
    tokenizer = load_model(tmp_path).tokenizer
    tokens = torch.tensor([tokenizer.encode(f"a{text}b{text}", add_special=False)])
    request = ask(0, f"a{TOKEN}b{TOKEN}", encoded(photo), encoded(picture(2)))
    for _ in range(2):  # the pieces are kept
        assert seen(engine, request).prompt_ids == tokens[0].tolist()
        assert engine.preparer.images.num_computed == said["pixel_values"].shape[1] == 10
    (answer,) = run_all(engine, [request]).values()
    begun = tokens.shape[1]
    with torch.no_grad():
        for _ in range(GREEDY["max_tokens"]):
            logits = theirs(input_ids=tokens, pixel_values=said["pixel_values"]).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None, None]], 1)
    assert ids_of(answer) == tokens[0, begun:].tolist()


def test_squares_of_what_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with_squares(tmp_path)
    engine = engine_of(tmp_path)
    for broken in (b"no image", encoded(picture(1))[:30]):
        with pytest.raises(RequestError, match="image 1 cannot be read"):
            seen(engine, ask(0, f"{TOKEN}{TOKEN}", encoded(picture(2)), broken))
    half = encoded(picture(1, (64, 64)))[:600]
    with pytest.raises(RequestError, match="image 0 cannot be read"):
        seen(engine, ask(0, TOKEN, half))


def test_what_a_device_cannot_do_is_refused_before_it_runs(folder: Path, theirs: Any, monkeypatch: Any) -> None:
    loaded = load_model(folder)
    assert loaded.sight is not None
    assert loaded.sight.config.vision.image_size == SIDE
    monkeypatch.setattr(
        "penjing.serve.runner.load.resolve_device", lambda config, *_: config.model_copy(update={"device": "cuda"})
    )
    with pytest.raises(ConfigError, match="a decoder that sees is served on a CPU only"):
        make_engine(loaded)


def test_generate_takes_images(folder: Path, theirs: Any, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(encoded(picture(1)))
    common = ["generate", str(folder), "--max-tokens", "3", "--temperature", "0"]
    shown = []
    for prompt in ("what?", f"{TOKEN}what?"):
        assert _run([*common, prompt, "--image", str(file)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.decode(wanted(theirs, f"{TOKEN}what?", [1], 3)) == shown[0].removesuffix("\n")
    assert _run([*common, "what?", "--image", str(tmp_path / "none.png")]) != 0
    assert "none.png cannot be read" in capsys.readouterr().err


def test_the_command_names_the_file_of_an_image_that_it_cannot_read(tmp_path: Path) -> None:
    write_seeing(tmp_path / "model")
    (tmp_path / "good.png").write_bytes(encoded(picture()))
    (tmp_path / "notes.png").write_text("text")
    files = [tmp_path / "good.png", tmp_path / "notes.png"]
    with pytest.raises(InputError, match=rf"^the image {files[1]} cannot be read: it is no JPEG or PNG image"):
        generate_to_terminal(tmp_path / "model", "in the", {"max_tokens": 2}, images=files)
