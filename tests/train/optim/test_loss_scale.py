"""The loss scale of a run that goes on with another window."""

from __future__ import annotations

from penjing.train.optim.loss_scale import LossScale


def test_a_shorter_window_takes_the_steps_before_it_into_account() -> None:
    before = LossScale(1024.0, 2000)
    for _ in range(1500):
        before.update(overflow=False)
    after = LossScale(1024.0, 1000)
    after.load_state_dict(before.state_dict())
    after.update(overflow=False)
    assert after.value == 2048.0
    for _ in range(999):
        after.update(overflow=False)
    assert after.value == 2048.0
    after.update(overflow=False)
    assert after.value == 4096.0
