"""Who waits for what does not answer is told so, once."""

from __future__ import annotations

import threading
import time

import pytest

from penjing.core.remote import late


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "LATE_S", 0.01)
    monkeypatch.setattr(late, "_said_at", {})


def test_what_takes_long_is_told_once_whoever_waits(capsys: pytest.CaptureFixture[str]) -> None:
    def wait() -> None:
        with late.told_if_late("s3://a: nothing has come"):
            time.sleep(0.2)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err == "s3://a: nothing has come\n"
    with late.told_if_late("s3://b: nothing has come"), late.told_if_late("s3://c: nothing has come"):
        time.sleep(0.2)
    assert sorted(capsys.readouterr().err.split("\n"))[1:] == ["s3://b: nothing has come", "s3://c: nothing has come"]


def test_what_comes_in_time_is_not_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "LATE_S", 0.1)
    with late.told_if_late("s3://a: nothing has come"):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
