"""A real Triton server whose eyes are a model of their own: batches, bits, and what happens when they hang or end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penjing.core.checkpoint.load import load_model, load_sight_of
from penjing.core.errors import RequestError, UnavailableError
from penjing.core.vision.sight import pictures_of
from penjing.serve.engine.config import BatchConfig, EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.families.repository import models_of
from penjing.serve.families.sight import SightModel, repository
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sight.eyes import Eyes
from penjing.serve.supervisor.export import export_repository
from penjing.serve.triton import eyes
from tests.serve.seeing import ROWS, SIDE, TOKEN, encoded, picture, write_seeing
from tests.serve.tiny import run_all, text_of
from tests.serve.triton.serving import Served, serving

server = pytest.mark.server
pytestmark = pytest.mark.xdist_group("sight")
SAMPLING: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
HIDDEN = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    write_seeing(made)
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder, {"image_batch": 8}, model_name="seer") as found:
        yield found


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[str]:
    """Answers of this process about pictures 0 to 23."""
    engine = load_engine(folder, EngineConfig(num_blocks=512))
    asked = [
        Request(str(seed), TOKEN, SamplingParams(**SAMPLING), images=(encoded(picture(seed)),)) for seed in range(24)
    ]
    found = run_all(engine, asked)
    return [text_of(found[str(seed), 0]) for seed in range(24)]


def eyes_pid(served: Served) -> int:
    """The process behind the model `sight`."""
    found = served.state
    assert found is not None
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        words = entry.read_bytes().split(b"\0")
        parent = int((entry.parent / "stat").read_text().rpartition(")")[2].split()[1])
        if parent == found.server_pid and any(word.endswith(b"/sight/1/model.py") for word in words):
            return int(entry.parent.name)
    raise AssertionError("no process has the model sight")


@server
def test_images_of_several_requests_are_one_batch_with_the_bits_of_this_process(
    served: Served, wanted: list[str]
) -> None:
    before = served.metrics()
    with served.client(model="seer") as client, ThreadPoolExecutor(24) as pool:
        os.kill(eyes_pid(served), signal.SIGSTOP)  # so that all have come before the first batch is gathered
        asked = [pool.submit(client.generate, TOKEN, images=[encoded(picture(seed))], **SAMPLING) for seed in range(24)]
        threading.Event().wait(0.5)
        os.kill(eyes_pid(served), signal.SIGCONT)
        assert [each.result().text for each in asked] == wanted
    after = served.metrics()
    batches, rows = (
        after[f'batch_rows_{kind}{{model="sight"}}'] - before.get(f'batch_rows_{kind}{{model="sight"}}', 0.0)
        for kind in ("count", "sum")
    )
    assert rows == 24
    assert batches <= 5
    with served.client(model="seer") as client:  # what was seen is kept: nothing is computed again
        assert client.generate(TOKEN, images=[encoded(picture(3))], **SAMPLING).text == wanted[3]
    assert served.metrics()['batch_rows_sum{model="sight"}'] == after['batch_rows_sum{model="sight"}']


@server
def test_answers_go_on_while_the_eyes_hang(served: Served, wanted: list[str]) -> None:
    pid = eyes_pid(served)
    os.kill(pid, signal.SIGSTOP)
    try:
        with served.client(model="seer") as client, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.generate, TOKEN, images=[encoded(picture(100))], **SAMPLING)
            assert client.generate("a text", max_tokens=50, ignore_eos=True).num_output_tokens == 50
            assert not waiting.done()
            os.kill(pid, signal.SIGCONT)
            assert waiting.result(30).num_output_tokens == SAMPLING["max_tokens"]
    finally:
        os.kill(pid, signal.SIGCONT)


@server
def test_pictures_of_another_shape_are_refused_and_disturb_nobody(served: Served, folder: Path) -> None:
    with served.client(model="sight") as client:
        rows = client.infer({"pixels": np.asarray(picture(1))[None]})["rows"]
        sight = load_sight_of(folder)
        assert np.array_equal(rows[0], Eyes(sight)(pictures_of(sight.config, encoded(picture(1))))[0].numpy())
        for bad, words in (
            (np.zeros((1, SIDE, SIDE + 1, 3), np.uint8), "shape"),
            (np.zeros((1, SIDE, SIDE, 1), np.uint8), "shape"),
            (np.zeros((1, SIDE, SIDE, 3), np.float32), "UINT8"),
            (np.zeros((9, SIDE, SIDE, 3), np.uint8), "max_batch_size"),
        ):
            with pytest.raises(RequestError, match=words):
                client.infer({"pixels": bad})


@server
def test_the_server_is_started_anew_when_the_eyes_end_and_waits_for_them_when_it_stops(
    served: Served, wanted: list[str]
) -> None:
    os.kill(eyes_pid(served), signal.SIGKILL)
    served.wait_ready(restarts=1)
    with served.client(model="seer") as client, ThreadPoolExecutor(1) as pool:
        assert client.generate(TOKEN, images=[encoded(picture(2))], **SAMPLING).text == wanted[2]
        os.kill(pid := eyes_pid(served), signal.SIGSTOP)
        waiting = pool.submit(client.generate, TOKEN, images=[encoded(picture(5))], **SAMPLING)
        threading.Event().wait(0.3)
        served.process.send_signal(signal.SIGTERM)
        threading.Event().wait(0.4)
        os.kill(pid, signal.SIGCONT)
        assert waiting.result(30).text == wanted[5]


def test_a_batch_has_the_bits_of_each_picture_alone(folder: Path) -> None:
    sight = load_sight_of(folder)
    pictures = [np.asarray(picture(seed)) for seed in range(11)]
    alone = [Eyes(sight, 1)([each])[0] for each in pictures]
    for threads in (1, 2, 3, 16):  # of which one picture may use all
        together = Eyes(sight, threads)(pictures)
        assert all(one.equal(other) for one, other in zip(alone, together, strict=True))
        assert Eyes(sight, threads)(pictures[:1])[0].equal(alone[0])
    assert Eyes(sight)([]) == []
    loaded = load_model(folder).sight
    assert loaded is not None
    assert Eyes(loaded)(pictures[:1])[0].equal(alone[0])


def test_requests_of_a_batch_get_their_own_rows(folder: Path) -> None:
    model = SightModel(folder, BatchConfig())
    begun = threading.Event()
    finish = model.start([model.example(), np.zeros((2, SIDE, SIDE, 3), np.uint8)], begun.set)
    found = finish()
    assert [answer["rows"].shape for answer in found if isinstance(answer, dict)] == [
        (1, ROWS, HIDDEN),
        (2, ROWS, HIDDEN),
    ]
    assert begun.is_set()
    with pytest.raises(RequestError, match="give pixels alone, got nothing"):
        model.prepare({})
    with pytest.raises(ValueError, match="axes"):
        Eyes(load_sight_of(folder))([np.zeros((1, 2), np.uint8)])


def test_the_repository_has_the_eyes_beside_the_decoder(folder: Path, tmp_path: Path) -> None:
    assert models_of(repository(folder, EngineConfig(), tmp_path / "one")) == ["llm", "sight"]
    assert models_of(repository(folder, EngineConfig(image_model=False), tmp_path / "other")) == ["llm"]
    made = export_repository(folder, tmp_path / "models", overrides=["image_batch=4"])
    text = (made.parent / "sight" / "config.pbtxt").read_text()
    assert "max_batch_size: 4" in text
    assert f'name: "pixels" data_type: TYPE_UINT8 dims: [ {SIDE}, {SIDE}, 3 ]' in text
    assert f'name: "rows" data_type: TYPE_FP32 dims: [ {ROWS}, {HIDDEN} ]' in text
    assert (made.parent / "sight" / "../llm/1/artifact" / "config.json").exists()


def test_a_gone_model_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyes, "PAUSE_SECONDS", 0.0)

    class GoneError(Exception):
        pass

    def ask(**_: Any) -> Any:
        raise GoneError("Stub process 'sight_0_0' is not healthy.")

    utils = SimpleNamespace(InferenceRequest=ask, Tensor=lambda *_: None, TritonModelException=GoneError)
    with pytest.raises(UnavailableError, match="try again later"):
        eyes.RemoteEyes(utils, "sight", 4)([np.zeros((2, 2, 3), np.uint8)])
