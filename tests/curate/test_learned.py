"""Heads beside scipy's optimiser, areas and calibration by their definitions, the student's band, labels and their
endpoint."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from penjing.core.errors import InputError, SetupError
from penjing.core.progress import Silent
from penjing.curate.documents.document import Document
from penjing.curate.learned.encoder import WINDOW_CHARS, windows_of
from penjing.curate.learned.heads import (
    area_under_curve,
    calibration_error,
    fit_head,
    learn_head,
    load_head,
    reliability,
)
from penjing.curate.learned.labels import Judge, read_labels
from penjing.curate.learned.student import fit_student, sure_band


def examples(number: int = 120, features: int = 6) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(0)
    x = dice.normal(size=(number, features)) * 3 + 1
    return x, dice.random(number) < 1 / (1 + np.exp(-(x[:, 0] - 1)))


def test_a_head_is_the_optimum_that_scipy_finds(tmp_path: Path) -> None:
    optimize = pytest.importorskip("scipy.optimize")
    x, y = examples()
    head = fit_head(x, y, 2.0)
    z = (x - x.mean(0)) / x.std(0)

    def loss(w: np.ndarray) -> float:
        logits = z @ w[:-1] + w[-1]
        return float(np.logaddexp(0, np.where(y, -logits, logits)).sum() + (w[:-1] ** 2).sum())

    best = optimize.minimize(loss, np.zeros(7), tol=1e-10)
    assert np.allclose(np.append(head.weights, head.bias), best.x, atol=1e-4)
    head.save(tmp_path / "head.json")
    assert np.array_equal(load_head(tmp_path / "head.json")(x), head(x))


def test_held_back_probabilities_know_nothing_of_labels_that_mean_nothing() -> None:
    x, _ = examples(200, 50)
    y = np.random.default_rng(5).random(200) < 0.5
    assert 0.35 < area_under_curve(learn_head(x, y)[1], y) < 0.65
    groups = np.arange(200) // 2  # each twice: only groups keep twins from teaching each other
    twins, of = np.repeat(x[:100], 2, 0), np.repeat(y[:100], 2)
    assert 0.3 < area_under_curve(learn_head(twins, of, groups)[1], of) < 0.7


def test_a_separable_set_does_not_run_away() -> None:
    x = np.repeat([[0.0], [1.0]], 30, 0)
    y = x[:, 0] > 0.5
    head, held = learn_head(x, y)
    assert np.isfinite(head.weights).all()
    assert area_under_curve(held, y) == 1


def test_area_counts_pairs() -> None:
    dice = np.random.default_rng(1)
    scores, y = dice.integers(0, 6, 60) / 5, dice.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[y] for b in scores[~y]]
    assert area_under_curve(scores, y) == pytest.approx(np.mean(pairs))


def test_calibration_is_the_weighted_distance() -> None:
    p = np.array([0.95] * 10 + [0.25] * 30)
    y = np.array([True] * 9 + [False] + [True] * 15 + [False] * 15)
    rows = reliability(p, y)
    assert [(row.examples, row.found) for row in rows] == [(30, 0.5), (10, 0.9)]
    assert calibration_error(rows) == pytest.approx((10 * 0.05 + 30 * 0.25) / 40)


def test_the_band_leaves_what_is_unsure() -> None:
    scores = np.arange(100) / 100
    yes = scores >= 0.5
    yes[45:55] = [True, False] * 5
    assert sure_band(scores, yes, 0.0) == (0.45, 0.55)
    low, high = sure_band(scores, yes, 0.3)
    assert low == high  # all is decided
    assert sure_band(scores[:10], yes[:10], 0.0) == (-1.0, 2.0)
    assert sure_band(np.full(100, 0.5), yes, 0.1) == (-1.0, 2.0)  # one score for all says nothing


def test_a_student_is_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("fasttext")
    texts = [f"good words of a kind {number}" if number % 2 else f"bad signs all over {number}" for number in range(60)]
    y = np.arange(60) % 2 == 1
    one, two = (fit_student(tmp_path / name, texts, y) for name in ("a.bin", "b.bin"))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert one("good words of a kind") > 0.5 > one("bad signs all over __label__yes")
    assert one("good words") == two("good words")
    assert 0 <= one("") <= 1


def test_windows_reach_both_ends() -> None:
    text = "".join(chr(97 + place // WINDOW_CHARS % 26) for place in range(10 * WINDOW_CHARS))
    assert windows_of("short", 3) == ["short"]
    assert windows_of("", 3) == [""]
    assert windows_of(text, 1) == [text[:WINDOW_CHARS]]
    assert [window[0] + window[-1] for window in windows_of(text, 3)] == ["aa", "ef", "jj"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"}', '"label" that is a number'),
        ('{"label": 1}', "neither"),
        ('{"text": "a", "label": "superb"}', "it has"),
        ('{"text": "a", "label": null}', "it has"),
        ('{"text": "a", "label": NaN}', ""),
        ("{oops", "mend or remove"),
    ],
)
def test_labels_that_are_none_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "labels.jsonl"
    path.write_text('{"text": "fine", "label": "good", "language": "en"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2") as error:
        read_labels(path)
    assert said in str(error.value) or said == "neither"
    path.write_text('{"text": "fine", "label": "Good", "language": "en"}\n{"text": "b", "label": false}\n')
    assert [(each.value, each.language) for each in read_labels(path)] == [(1.0, "en"), (0.0, "")]


class _Endpoint(BaseHTTPRequestHandler):
    """OpenAI's interface as far as it is needed; `answer` maps a question to an answer or a status."""

    asked: ClassVar[list[str]] = []
    models: ClassVar[list[str]] = ["only"]

    @staticmethod
    def answer(question: str) -> str | int:
        return "5" if "good" in question.split("===\n")[1] else "<think>0 or 1?</think> Score: 1/5."

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        said = self.answer(question)
        if isinstance(said, int):
            self._send(said, {"error": {"message": "no such key"}})
            return
        self.asked.append(question)
        message = {"role": "assistant", "content": said}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        self._send(200, {"id": "x", "object": "chat.completion", "model": "only", "created": 0, "choices": [choice]})

    def _send(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def endpoint(**attributes: object) -> Iterator[tuple[str, type[_Endpoint]]]:
    kind = type("Kind", (_Endpoint,), {"asked": [], **attributes})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", kind
    finally:
        server.shutdown()
        server.server_close()


def documents(number: int) -> list[Document]:
    return [Document(f"d{n}", f"{'good' if n % 3 else 'bad'} text {n}", "s", "d", language="en") for n in range(number)]


def test_a_model_is_asked_once_for_each(tmp_path: Path) -> None:
    with endpoint() as (url, kind):
        judge = Judge(url, "", "anything", 10)
        first = judge.labels(documents(9), 6, tmp_path, Silent())
        assert [each.value for each in first] == [1, 5, 5, 1, 5, 5]
        (kept,) = tmp_path.glob("labels-*.jsonl")
        with open(kept, "a") as file:
            file.write('{"name": "cut o')  # as a killed run leaves it
        again = judge.labels(documents(9), 9, tmp_path, Silent())
        assert again[:6] == first
        assert len(again) == 9
        assert len(kind.asked) == 9
        Judge(url, "", "something else", 10).labels(documents(9), 1, tmp_path, Silent())
        assert len(kind.asked) == 10


def test_what_an_endpoint_may_do_wrong(tmp_path: Path) -> None:
    def judge(url: str, model: str = "") -> None:
        Judge(url, model, "x", 10).labels(documents(20), 20, tmp_path, Silent())

    chatty, shut = (staticmethod(lambda question, said=said: said) for said in ("I like it", 401))
    with endpoint(answer=chatty) as (url, _), pytest.raises(InputError, match="no number from 0 to 5, such as 'I like"):
        judge(url)
    with endpoint(answer=shut) as (url, _), pytest.raises(SetupError, match=r"answers 401.*no such key.*OPENAI_API"):
        judge(url)
    with endpoint(models=["a", "b"]) as (url, _), pytest.raises(SetupError, match="2 models: a, b; name one"):
        judge(url)


def test_an_endpoint_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penjing.curate.learned.labels._TRIES", 0)
    with pytest.raises(SetupError, match="cannot be reached"):
        Judge("http://127.0.0.1:9/v1", "m", "x", 1).labels(documents(1), 1, tmp_path, Silent())
    with pytest.raises(SetupError, match="cannot be reached"):
        Judge("nonsense", "m", "x", 1).labels(documents(1), 1, tmp_path, Silent())
