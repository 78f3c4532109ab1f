"""Pipeline parallelism of a decoder: stages of consecutive layers, run by torch.distributed.pipelining.

A pipeline pass takes the micro-batches that the loop would accumulate. schedule (bubble as a share of the work, p
stages, m micro-batches): gpipe and 1f1b (p−1)/m; interleaved, two stages a process, half of that; zbv and dualpipev,
which split the backward pass in two, nearly none. Losses are sums that the loop has scaled, so gradients are not
divided by the number of micro-batches (`scale_grads=False`).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from penjing.core.errors import ConfigError
from penjing.core.models.attention import causal_attention, document_positions
from penjing.core.models.decoder import Decoder, capped_logits, table_basis
from penjing.core.models.moe import watch_routing
from penjing.core.models.rope import layer_angles
from penjing.train.numerics.gradients import gradients_of
from penjing.train.objective.balancing import Balanced, StageBalancing
from penjing.train.objective.cross_entropy import logits_in_parts
from penjing.train.objective.objective import IGNORED, Batch, CrossEntropy, Loss, Objective
from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.context import Context
from penjing.train.pipeline.balance import Balance, StageClock

_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class TimedStage(PipelineStage):
    """A stage whose work is measured by `clock`; waiting for other stages is not part of it."""

    clock: StageClock

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`."""
        with self.clock.piece(self.stage_index, "F"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`: the whole backward pass, or that of the inputs."""
        with self.clock.piece(self.stage_index, "I"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`."""
        with self.clock.piece(self.stage_index, "W"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class DecoderStage(nn.Module):
    """Some consecutive layers of a decoder, with the embedding before the first and norm and head after the last.

    Parameters keep their names. The first stage takes tokens (B, T) int64, the others hidden states; the last gives
    logits (B, T, V).

    Attributes: balancing: of its experts, in a training step.
    """

    balancing: StageBalancing | None = None

    def __init__(self, decoder: Decoder, layers: range, sequence_parts: int, context: Context | None) -> None:
        super().__init__()
        backbone = decoder.model
        self.config = decoder.config
        self.is_first = layers.start == 0
        self.is_last = layers.stop == len(backbone.layers)
        self.context = context
        self.sequence_parts = sequence_parts  # hidden states hold one of so many parts of the tokens
        self.model = nn.Module()
        if self.is_first:
            self.model.embed_tokens = backbone.embed_tokens
        # Layers of other stages leave their place, so that names stay.
        self.model.layers = nn.ModuleList(
            layer if index in layers else nn.Identity() for index, layer in enumerate(backbone.layers)
        )
        if self.is_last:
            self.model.norm = backbone.norm
            self.lm_head = decoder.lm_head
        self.register_buffer("inverse_frequency", backbone.inverse_frequency, persistent=False)
        self.layers_here = layers
        self.has_experts = any(self.config.is_moe(layer) for layer in layers)

    def forward(
        self, x: torch.Tensor, documents: torch.Tensor | None = None, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See the class; documents (B, T) as `Decoder` takes them, counted (B, T) bool where `balancing` needs it."""
        layers: list[Any] = [self.model.get_submodule(f"layers.{index}") for index in self.layers_here]
        length = x.shape[1] * (1 if self.is_first else self.sequence_parts)
        attend = (
            causal_attention(self.config, documents) if self.context is None else self.context.attention(self.config)
        )
        if self.context is not None:
            positions = self.context.positions(x.shape[0], length, x.device)
        elif documents is None:
            positions = torch.arange(length, device=x.device).expand(x.shape[0], length)
        else:
            positions = document_positions(documents)
        if self.is_first:
            x = table_basis(self.model.embed_tokens(x), self.config).to(layers[0].dtype)  # pyright: ignore[reportCallIssue]
        angles = layer_angles(self.config, self.inverse_frequency, positions)  # pyright: ignore[reportArgumentType]
        with watch_routing() as routings:
            for index, layer in zip(self.layers_here, layers, strict=True):
                x = layer(x, *angles(index), attend)
        if self.balancing is not None and counted is not None:
            x = self.balancing(x, routings, counted.flatten())
        if not self.is_last:
            return x
        x = self.model.norm(x)  # pyright: ignore[reportCallIssue]
        return capped_logits(self.lm_head(table_basis(x, self.config).to(x.dtype)), self.config)


class LocalStages(nn.Module):
    """The stages of one process as the model that it trains.

    Attributes: names: parameter's name here → in the whole model. repeated: names here of copies of parameters that
        are at home in another process.
    """

    is_part = True  # see state.py

    def __init__(self, parts: list[DecoderStage]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    @property
    def names(self) -> dict[str, str]:
        """See the class."""
        whole = {name: name.split(".", 2)[2] for name, _ in self.named_parameters()}
        return whole | dict.fromkeys(self.repeated, "model.embed_tokens.weight")

    @property
    def repeated(self) -> frozenset[str]:
        """See the class."""
        return frozenset(
            f"parts.{index}.lm_head.weight"
            for index, part in enumerate(self.parts)
            if part.config.tie_word_embeddings and part.is_last  # pyright: ignore[reportAttributeAccessIssue]
        )


def split_stages(decoder: Decoder, config: ParallelConfig, rank: int, context: Context | None) -> LocalStages:
    """The stages of process `rank` of a pipeline; the rest of `decoder` is let go.

    Layers are shared out evenly, the fuller stages last, unless parallel.stage_layers says how many each stage has.
    """
    total, layers = config.num_stages, decoder.config.num_hidden_layers
    assert config.stage_layers != "cost", "split_by_cost comes before"
    counts = config.stage_layers or [layers * (s + 1) // total - layers * s // total for s in range(total)]
    begins = [sum(counts[:stage]) for stage in range(total + 1)]
    parts = config.tp if config.sequence else 1
    return LocalStages(
        [
            DecoderStage(decoder, range(begins[stage], begins[stage + 1]), parts, context)
            for stage in config.stages_of(rank)
        ]
    )


def _as_taken_by(objective: Objective) -> AbstractContextManager[None]:
    """In which the last stage's head, if it is split, gives its logits as `objective` takes them."""
    return logits_in_parts() if getattr(objective, "takes_parts", False) else nullcontext()


class Pipeline:
    """The stages of this process wired to the others'; what the loop calls in place of the model.

    Args:
        local: split over tensors, shared by FSDP.
        rank, group: of this process in its pipeline.
        balance: resizes micro-batches between steps.
    """

    def __init__(
        self,
        local: LocalStages,
        config: ParallelConfig,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        balance: Balance | None = None,
    ) -> None:
        self._parts: dict[int, DecoderStage] = dict(zip(config.stages_of(rank), local.parts, strict=True))  # type: ignore[arg-type]
        self._config = config
        self._rank = rank
        self._group = group
        self._device = device
        self._balance = balance
        self._num = 0  # micro-batches that `_made` is for
        self._made: Any = None
        self._objective: Objective = CrossEntropy()
        self._factor = 1.0

    def backward(self, objective: Objective, micro_batches: list[Batch], factor: float) -> dict[str, torch.Tensor]:
        """Gradients of factor × loss, summed over the micro-batches of a step, which have equal shapes; the sum of the
        losses, in the process that holds the last stage.

        Raises:
            ConfigError: too few micro-batches for the schedule.
        """
        self._objective, self._factor = objective, factor
        total = torch.zeros((), dtype=torch.float64)
        began_s = time.perf_counter()
        if isinstance(objective, Balanced):
            for index, part in self._parts.items():
                if part.has_experts:
                    layers = sum(map(part.config.is_moe, range(part.config.num_hidden_layers)))
                    part.balancing = StageBalancing(objective, index, layers, factor)
        at_once = self._config.micro_batches or len(micro_batches)
        if len(micro_batches) % at_once:
            raise ConfigError(
                f"parallel.micro_batches={at_once} does not divide the {len(micro_batches)} micro-batches of a step "
                "(data.batch_size / data.micro_batch / parallel.dp)"
            )
        for begin in range(0, len(micro_batches), at_once):
            total += self._pass(micro_batches[begin : begin + at_once])
        if self._balance is not None:
            self._balance.after_step(began_s)
        loss = total / factor
        if not isinstance(objective, Balanced):
            return {"loss": loss}
        stages = [part.balancing for part in self._parts.values() if part.balancing is not None]
        return objective.totals(loss, stages, len(micro_batches), self._group, self._device)

    @property
    def values(self) -> dict[str, float]:
        """What the balancer has seen of the last step, for its record."""
        return {} if self._balance is None else self._balance.values

    def evaluate(self, objective: Objective, batch: Batch) -> Loss:
        """The loss of one batch, stage after stage, in the process that holds the last; zero elsewhere. No gradient."""
        x = batch["tokens"]
        inside = {"documents": batch["documents"]} if "documents" in batch else {}
        for index in range(self._config.num_stages):
            owner, previous = self._config.owner(index), self._config.owner(max(index - 1, 0))
            if owner != self._rank:
                if previous == self._rank and index > 0:
                    dist.send(x.contiguous(), group=self._group, group_dst=owner)
                continue
            part = self._parts[index]
            if previous != self._rank:
                x = self._empty_hidden(part, batch["tokens"])
                dist.recv(x, group=self._group, group_src=previous)
            with _as_taken_by(objective):
                x = part(x, **inside)
            if index == self._config.num_stages - 1:
                return objective(nn.Identity(), {"tokens": x, "targets": batch["targets"]})
        return Loss(torch.zeros((), device=self._device))

    def _pass(self, micro_batches: list[Batch]) -> float:
        batch = {name: torch.cat([one[name] for one in micro_batches]) for name in micro_batches[0]}
        tokens = (batch["tokens"],) if 0 in self._parts else ()
        target = batch["targets"] if self._config.num_stages - 1 in self._parts else None
        inside = {"documents": batch["documents"]} if "documents" in batch else {}
        balancings = [part.balancing for part in self._parts.values() if part.balancing is not None]
        if balancings:
            inside["counted"] = batch["targets"] != IGNORED
        losses: list[torch.Tensor] | None = None if target is None else []
        num = len(micro_batches)
        if self._balance is not None:
            rows = len(batch["targets"])
            num = rows // self._balance.size(rows, rows // num)
        with _as_taken_by(self._objective):
            self._schedule(num).step(*tokens, target=target, losses=losses, return_outputs=False, **inside)
        for balancing in balancings:
            balancing.end_pass(num)
        return sum(float(loss.detach()) for loss in losses or ())

    def _schedule(self, num: int) -> Any:
        """torch's schedule of `num` micro-batches, and stages for it: their buffers have the shape of one."""
        if num == self._num:
            return self._made
        stages = [
            (PipelineStage if self._balance is None else TimedStage)(
                part, index, self._config.num_stages, self._device, group=self._group
            )
            for index, part in self._parts.items()
        ]
        for stage in stages:
            if isinstance(stage, TimedStage):
                assert self._balance is not None
                stage.clock = self._balance.clock
        made: Any = _SCHEDULES[self._config.schedule]
        try:
            self._made = made(
                stages if self._config.stages_per_process > 1 else stages[0], num, loss_fn=self._loss, scale_grads=False
            )
        except ValueError as error:
            raise ConfigError(
                f"parallel.schedule = {self._config.schedule!r} with pp={self._config.pp} cannot run {num} "
                f"micro-batches ({error}); lower data.micro_batch, raise data.batch_size, or use 'gpipe'"
            ) from error
        self._num = num
        return self._made

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Also called when torch tries shapes out: what it returns is all that may be counted.
        with nullcontext() if self._balance is None else self._balance.clock.piece(self._config.num_stages - 1, "loss"):
            return self._objective(nn.Identity(), {"tokens": logits, "targets": targets}).total * self._factor

    def _empty_hidden(self, part: DecoderStage, tokens: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        dtype = part.model.layers[part.layers_here.start].dtype  # type: ignore[union-attr, index]
        size = (rows, length // part.sequence_parts, part.config.hidden_size)
        return torch.empty(size, dtype=dtype, device=self._device)  # type: ignore[arg-type]


@torch.no_grad()
def sum_tied(local: LocalStages, group: dist.ProcessGroup) -> None:
    """Sum the gradients of embedding and head, which are one parameter in two stages, over the two processes."""
    names = local.names
    for name, parameter in local.named_parameters():
        if names[name] == "model.embed_tokens.weight":
            for gradient in gradients_of([parameter]):
                dist.all_reduce(gradient, group=group)
