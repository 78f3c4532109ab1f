"""What pairs of an image and a text teach: each belongs to its own and to no other pair of the step.

Every pair's loss depends on all pairs of a step, in all processes and micro-batches. So the vectors of a step come
first, the gradient with respect to each vector is computed from all of them at once, and each micro-batch then takes
the gradient of its own vectors through the model (GradCache, https://arxiv.org/abs/2101.06983). The update is that of
one batch in one process; vectors of a step that is cut in several micro-batches are computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.vision.towers import Seen
from penjing.train.objective.objective import Batch, Loss, Objective
from penjing.train.processes.world import World

Kind = Literal["clip", "siglip"]
RECALL = (1, 5, 10)


def contrastive_sum(kind: Kind, seen: Seen, group_N: Tensor, real_N: Tensor) -> Tensor:
    """The sum over N pairs of the loss, of which the mean is what CLIP or SigLIP minimises.

    - clip: half of the cross-entropies of an image among all texts and of a text among all images
      (https://arxiv.org/abs/2103.00020);
    - siglip: -log σ(±(scale × product + bias)) summed over all texts of an image (https://arxiv.org/abs/2303.15343).

    Args:
        group_N: pairs of one number say the same, and are no negatives of each other.
        real_N: bool; the others only fill a batch up.
    """
    logits_NN = seen.scale * seen.images @ seen.texts.T + seen.bias
    own_NN = torch.eye(len(group_N), dtype=torch.bool, device=group_N.device)
    apart_NN = (group_N[:, None] != group_N) & real_N & real_N[:, None]
    if kind == "siglip":
        each = -F.logsigmoid(torch.where(own_NN, logits_NN, -logits_NN))
        return torch.where(apart_NN | (own_NN & real_N), each, 0.0).sum()
    compared = torch.where(apart_NN | own_NN, logits_NN, float("-inf"))
    both = compared.logsumexp(0) + compared.logsumexp(1) - 2 * logits_NN.diagonal()
    return 0.5 * torch.where(real_N, both, 0.0).sum()


class _Part(NamedTuple):
    """The gradients of a step's loss that belong to one micro-batch, and its share of the loss."""

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor
    loss: Tensor


class Contrastive:
    """`contrastive_sum` over all pairs of a step, whichever process and micro-batch they are in.

    Batches have "images", "group" (N,) int64, "real" (N,) bool, and "tokens" and "mask" (N, T), or "features" (N, H).
    """

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.world = World()
        self._parts: list[_Part] = []

    def bind(self, world: World) -> None:
        """Pairs of all processes of `world` are told apart from now on."""
        self.world = world

    def count(self, batch: Batch) -> int:
        """The pairs that are there not only to fill a batch up."""
        return int(batch["real"].sum())

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch]) -> None:
        """See `WholeStep`: the vectors of a step that is cut in several parts."""
        self._parts = []
        if len(micro_batches) > 1:
            with torch.no_grad(), _statistics_kept(model):
                self._parts = self._step([see(model, batch) for batch in micro_batches], micro_batches)[::-1]

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        seen = see(model, batch)
        part = self._parts.pop() if self._parts else self._step([seen], [batch])[0]
        path = (seen.images * part.image).sum() + (seen.texts * part.text).sum()
        path = path + seen.scale * part.scale + seen.bias * part.bias
        # The gradient of `path`, the value of the loss.
        return Loss(path + (part.loss - path).detach())

    def evaluation(self) -> Objective:
        """How well images and texts find each other."""
        return Retrieval(self.kind)

    def _step(self, seen: Sequence[Seen], batches: Sequence[Batch]) -> list[_Part]:
        """What each micro-batch of this process adds."""
        mine = Seen(
            torch.cat([each.images for each in seen]).detach(), torch.cat([each.texts for each in seen]).detach(),
            seen[0].scale.detach(), seen[0].bias.detach(),
        )  # fmt: skip
        group, real = (torch.cat([batch[name] for batch in batches]) for name in ("group", "real"))
        with torch.enable_grad():
            whole = Seen(
                self._gather(mine.images).requires_grad_(), self._gather(mine.texts).requires_grad_(),
                mine.scale.clone().requires_grad_(), mine.bias.clone().requires_grad_(),
            )  # fmt: skip
            every = self._gather(real)
            loss = contrastive_sum(self.kind, whole, self._gather(group), every)
            found = torch.autograd.grad(loss, list(whole), allow_unused=True)
        images, texts, scale, bias = (
            torch.zeros_like(of) if gradient is None else gradient for of, gradient in zip(whole, found, strict=True)
        )
        first = self.world.rank * len(real)
        parts, total = [], every.sum().clamp(min=1)
        for batch in batches:
            rows = slice(first, first := first + len(batch["real"]))
            share = batch["real"].sum().to(loss.dtype) / total
            parts.append(_Part(images[rows], texts[rows], scale * share, bias * share, loss.detach() * share))
        return parts

    def _gather(self, mine: Tensor) -> Tensor:
        """The rows of all processes, in their order."""
        if self.world.size == 1:
            return mine
        whole = torch.zeros(self.world.size, *mine.shape, dtype=mine.dtype, device=mine.device)
        if mine.dtype == torch.bool:
            return self._gather(mine.to(torch.uint8)).to(torch.bool)
        whole[self.world.rank] = mine
        return self.world.sum(whole).flatten(0, 1)


class Retrieval:
    """How well images and texts of one batch, the held-out pairs, find each other; and the loss that they have.

    - image_to_text_at_K: share of images among whose K nearest different texts is their own;
    - text_to_image_at_K: share of texts among whose K nearest images is one of theirs, with pairs of one text as one.

    Ties count as missed.
    """

    def __init__(self, kind: Kind, rows: int = 128) -> None:
        self.kind: Kind = kind
        self._rows = rows

    def count(self, batch: Batch) -> int:
        """All pairs."""
        return int(batch["real"].sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class; `batch` is seen a few rows at a time."""
        parts = [
            see(model, {name: value[begin : begin + self._rows] for name, value in batch.items()})
            for begin in range(0, len(batch["real"]), self._rows)
        ]
        seen = Seen(
            torch.cat([each.images for each in parts]), torch.cat([each.texts for each in parts]), *parts[0][2:]
        )
        group, real = batch["group"], batch["real"]
        total = contrastive_sum(self.kind, seen, group, real)
        scores = seen.images @ seen.texts.T
        same = group[:, None] == group
        # The first pair of a text stands for all: another of its texts would only be the same candidate again.
        repeated = (same & torch.ones_like(same).tril(-1)).any(1)
        missed = ~same & ~(scores < scores.diagonal()[:, None]) & ~repeated  # also where a score is no number
        text_rank = missed.sum(1)
        best = torch.where(same, scores, float("-inf")).amax(0)
        image_rank = (~same & ~(scores < best)).sum(0)
        metrics = {
            f"{name}_at_{most}": ((rank < most) & real).sum().to(torch.float32)
            for name, rank in (("image_to_text", text_rank), ("text_to_image", image_rank))
            for most in RECALL
        }
        return Loss(total, metrics)


def see(model: nn.Module, batch: Batch) -> Seen:
    """The vectors of a batch's pairs."""
    if "features" in batch:
        return model(batch["images"], features_NH=batch["features"])
    return model(batch["images"], batch["tokens"], batch["mask"])


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Inside, batch norm's running statistics stay: the same images come again."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
            norm.num_batches_tracked = None
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
