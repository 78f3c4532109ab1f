"""What a run is told of the settings in which it differs from its state."""

from __future__ import annotations

from pydantic import Field

from penjing.core.config import Config
from penjing.train.state.resume import changed_settings


class Small(Config):
    mode: str = Field(description="A setting that may be left to the machine.")
    steps: int = Field(default=1, description="One that is no difference.")
    seed: int = Field(default=0, description="Another setting.")


def test_what_auto_became_is_told_with_its_name() -> None:
    saved = {"mode": "bf16", "steps": 2, "seed": 3}
    asked = Small(mode="auto")
    assert changed_settings(saved, Small(mode="fp32"), asked) == [
        'mode was "bf16", is "fp32" (of "auto")',
        "seed was 3, is 0",
    ]
    assert changed_settings(saved, Small(mode="fp32", seed=3), Small(mode="fp32")) == ['mode was "bf16", is "fp32"']
    assert changed_settings(saved, Small(mode="bf16", seed=3), asked) == []
