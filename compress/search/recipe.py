"""What a search recipe says: the compression recipe that is varied, its choices, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penjing.core.cluster.ray_cluster import RaySettings
from penjing.core.config import Config, OutputFolder

CostName = Literal["macs", "bytes", "latency"]
WHOLE, GONE = 1.0, 0.0
FLOATING, STORED, PACKED = 32, 8, 4


class Choices(Config):
    """`[space]`: what each group of channels and each layer may be. The network as it is has to be among it."""

    widths: tuple[float, ...] = Field(
        default=(1.0, 0.75, 0.5),
        min_length=1,
        description="Shares of its units that a group may keep, falling from 1.0, the network as it is. [1.0] alone "
        "prunes nothing. Of a decoder, the groups are the channels of each layer's MLP.",
    )
    bits: tuple[Literal[32, 8, 4], ...] = Field(
        default=(32, 8),
        min_length=1,
        description="Bits that a layer's weights may have, the network as it is first: [32, 8] of classifiers and "
        "graphs, 32 being floating; [8, 4] of decoders, as the quantize step of base stores 4 bits. One alone leaves "
        "nothing to choose.",
    )
    layers: bool = Field(default=False, description="Whether whole layers of a decoder may leave, all but the first.")
    windows: tuple[int, ...] = Field(
        default=(),
        description="Tokens that a query of a decoder's layer may be left to see, its own included, falling, beside "
        "what it sees as it is. With 1 it looks nothing up: no attention is left but products of its own token. They "
        "need cost=latency, texts of more tokens (data.window of base) and a longer workload.context.",
    )

    @field_validator("widths")
    @classmethod
    def _falling(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if values[0] != WHOLE:
            raise ValueError(f"begin with 1.0, the network as it is: [1.0, {', '.join(map(str, values))}]")
        if list(values) != sorted(set(values), reverse=True) or values[-1] < 0.1:
            raise ValueError("each below the one before, and at least 0.1")
        return values

    @field_validator("bits")
    @classmethod
    def _widest_first(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if list(values) != sorted(set(values), reverse=True):
            raise ValueError("begin with the network as it is, each below the one before: [32, 8], or [8, 4]")
        return values

    @field_validator("windows")
    @classmethod
    def _shorter(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if list(values) != sorted(set(values), reverse=True) or (values and values[-1] < 1):
            raise ValueError("numbers of tokens of 1 or more, each below the one before: [1024, 256]")
        return values


class Workload(Config):
    """`[workload]`: what is timed where the cost is `latency`, on as many threads as the runtime takes by itself."""

    streams: int = Field(default=1, ge=1, le=4096, description="Sequences that a decoder goes on with at a time.")
    context: int = Field(default=128, ge=1, description="Tokens that each of them holds already.")
    batch: int = Field(default=1, ge=1, description="Inputs at a time, of a classifier or a graph.")
    rounds: int = Field(default=15, ge=3, le=1000, description="Times that everything is timed; medians count.")


class Heal(Config):
    """`[heal]`: some points of the front are made and trained as base's steps say, and a second round is chosen around
    them by what healing forgave. They are judged by the same samples, which training may see; INT8 is calibrated."""

    points: int = Field(
        default=3,
        ge=1,
        le=100,
        description="Points of the first front that are healed, spread over its costs. Each takes as long as the "
        "steps of base that train; how long is said after the first.",
    )
    second: int = Field(
        default=2,
        ge=0,
        le=100,
        description="Further points, healed too, of the front that what was healed foretells; 0: no second round.",
    )
    uniform: bool = Field(
        default=False,
        description="Whether uniform choices are healed as well, and beside each the best within its cost, so that "
        "they are compared after equal healing.",
    )
    steps: int | None = Field(
        default=None, ge=1, description="Of each step of base that trains, such as 100; by default as base says."
    )


class JointRecipe(Config):
    """A joint search: how wide each group of channels, how many bits each layer, and of a decoder which layers stay and
    how far back each sees, chosen together. Single changes and some combinations are measured on the samples of the
    base's [data], a sum with a term for each pair of neighbours is fitted to them, and all combinations that nothing
    beats in its loss and its cost are found exactly."""

    base: Path = Field(
        description="The compression recipe that is varied: a file, or a name of `penjing recipe list`. Its prune step "
        "gets a share for each group, its quantize step the layers that stay floating; its other steps heal."
    )
    output: OutputFolder = Field(
        description="The folder to make: search.json, report.html, and front-NN.toml, recipes."
    )
    settings: dict[str, Any] = Field(
        default={}, description='Settings that are not those of `base`, such as "data.images" or "steps.0.method".'
    )
    space: Choices = Field(default=Choices(), description="What may be chosen.")
    workload: Workload = Field(default=Workload(), description="What is timed where the cost is latency.")
    cost: CostName = Field(
        default="macs",
        description='What a choice costs: "macs", multiply-accumulates of an input, an INT8 one counting a quarter of '
        'a floating one; "bytes", those of the weights of convolutions and linear layers; "latency", seconds of what '
        "[workload] says, from a table of layers that are timed alone and a sum that is fitted to whole networks, in "
        "ONNX Runtime, of decoders in penjing's own engine.",
    )
    budget: float | None = Field(
        default=None, gt=0, lt=1, description="Most that a point may cost, as a part of what the network costs."
    )
    floor: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Least that a point is to cost, as such a part: below it networks are of no interest, and none of "
        "the points is spent on them.",
    )
    combinations: int = Field(
        default=48,
        ge=8,
        le=10_000,
        description="Combinations that are measured to fit the sum; a third near its front.",
    )
    points: int = Field(default=8, ge=2, le=200, description="Points of the front that become recipes.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Of the combinations.")
    heal: Heal | None = Field(
        default=None,
        description="With this section points are healed, and recipes are written for those that nothing beats then; "
        "without, recipes are those of the front before healing.",
    )
    ray: RaySettings | None = Field(
        default=None, description="With this section combinations are measured on a Ray cluster; times are taken here."
    )

    @model_validator(mode="after")
    def _costs_fit(self) -> JointRecipe:
        if self.budget is not None and self.floor >= self.budget:
            raise ValueError(f"floor={self.floor:g} leaves nothing below budget={self.budget:g}; lower it")
        if self.space.windows and self.cost != "latency":
            raise ValueError(
                f'space.windows with cost={self.cost}: a window takes no weights away, but time; set cost="latency"'
            )
        return self
