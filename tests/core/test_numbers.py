"""One of anything is told in the singular."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.config import Pixels
from penjing.core.graph.trace import from_torch
from penjing.train.pipeline.split import equal_split


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    with pytest.raises(ValidationError, match="L images have 1 channel, so mean and std need 1 number"):
        Pixels(height=2, width=2, mean=(0.5, 0.5), std=(0.5,), order="L")
    with pytest.raises(InputError, match="the axis input:1=b: input has 1 axis"):
        from_torch(torch.nn.ReLU(), (torch.zeros(3),), dynamic={"input": {1: "b"}})
    with pytest.raises(ConfigError, match="1 layer cannot be split into 2 stages"):
        equal_split(1, 2)
