"""What pairs teach: CLIP's and SigLIP's losses as transformers computes them, however a step is cut."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penjing.core.vision.towers import Seen
from penjing.train.objective.contrastive import Contrastive, Kind, Retrieval, contrastive_sum
from penjing.train.objective.objective import Batch
from penjing.train.processes.world import World

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: tuple[Kind, ...] = ("clip", "siglip")


class Theirs(nn.Module):
    """A model of transformers with random weights, called as ours."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        import transformers

        torch.manual_seed(0)
        text, image = (
            SMALL | {"vocab_size": 50, "max_position_embeddings": 8},
            SMALL | {"image_size": 8, "patch_size": 4},
        )
        if kind == "clip":
            config: Any = transformers.CLIPConfig(
                text_config=text | {"eos_token_id": 49}, vision_config=image, projection_dim=16
            )
            self.model: Any = transformers.CLIPModel(config).double()
        else:
            config = transformers.SiglipConfig(text_config=text, vision_config=image)
            self.model = transformers.SiglipModel(config).double()
            nn.init.constant_(self.model.logit_scale, 1.5)
            nn.init.constant_(self.model.logit_bias, -2.0)
        self.kind = kind

    def forward(self, images: Tensor, tokens: Tensor, mask: Tensor) -> Seen:
        out = self.model(input_ids=tokens, pixel_values=images)
        scale = self.model.logit_scale.exp().squeeze()
        bias = torch.zeros_like(scale) if self.kind == "clip" else self.model.logit_bias.squeeze()
        return Seen(out.image_embeds, out.text_embeds, scale, bias)


def pairs(count: int, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 40, (count, 6), generator=generator)
    tokens[:, -1] = 49
    return {
        "images": torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64),
        "tokens": tokens,
        "mask": torch.ones_like(tokens),
        "group": torch.arange(count),
        "real": torch.ones(count, dtype=torch.bool),
    }


def cut(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    parts = zip(*(value.split(list(sizes)) for value in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def learn(objective: Contrastive, model: nn.Module, batches: list[Batch], count: int) -> float:
    objective.begin(model, batches)
    total = 0.0
    for batch in batches:
        loss = objective(model, batch)
        (loss.total / count).backward()
        total += float(loss.total.detach())
    return total / count


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(kind: Kind) -> None:
    model, batch = Theirs(kind), pairs(6)
    theirs = model.model(input_ids=batch["tokens"], pixel_values=batch["images"], return_loss=True).loss
    theirs.backward()
    wanted = gradients(model)
    ours = learn(Contrastive(kind), model, [batch], 6)
    assert ours == pytest.approx(theirs.item(), abs=1e-10)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=1e-7, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[3, 3], [2, 2, 2]])
def test_micro_batches_change_nothing(kind: Kind, sizes: list[int]) -> None:
    model, batch = Theirs(kind), pairs(6)
    whole = learn(Contrastive(kind), model, [batch], 6)
    wanted = gradients(model)
    assert learn(Contrastive(kind), model, cut(batch, sizes), 6) == pytest.approx(whole, abs=1e-10)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], atol=1e-10, rtol=1e-8, msg=name)


class Together(World):
    """Two processes of one test, as threads."""

    parts: list[Tensor | None]
    meeting: threading.Barrier

    def sum(self, values: Tensor) -> Tensor:
        self.parts[self.rank] = values.clone()
        self.meeting.wait(30)
        total = sum(part for part in self.parts if part is not None)
        self.meeting.wait(30)
        return values.copy_(torch.as_tensor(total))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", [1, 2])
def test_processes_change_nothing(kind: Kind, micro: int) -> None:
    """Also where the last pair only fills the batch up."""
    batch = pairs(8)
    batch["real"][-1] = False
    model = Theirs(kind)
    whole = learn(Contrastive(kind), model, [batch], 7)
    wanted = gradients(model)
    shared: list[Tensor | None] = [None, None]
    meeting, models, losses = threading.Barrier(2), [Theirs(kind), Theirs(kind)], [0.0, 0.0]

    def process(rank: int) -> None:
        world = Together(rank, 2)
        object.__setattr__(world, "parts", shared)
        object.__setattr__(world, "meeting", meeting)
        objective = Contrastive(kind)
        objective.bind(world)
        mine = cut(batch, [4, 4])[rank]
        losses[rank] = learn(objective, models[rank], cut(mine, [4 // micro] * micro), 7)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(losses) == pytest.approx(whole, abs=1e-10)
    first, second = map(gradients, models)
    for name, gradient in wanted.items():
        torch.testing.assert_close(first[name] + second[name], gradient, atol=1e-10, rtol=1e-8, msg=name)


def test_pairs_that_say_the_same_are_not_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (nn.functional.normalize(torch.randn(3, 4, generator=generator), dim=1) for _ in range(2))
    scale, bias = torch.tensor(5.0), torch.tensor(0.0)
    real = torch.ones(3, dtype=torch.bool)
    for kind in KINDS:
        loss = contrastive_sum(kind, Seen(one, other, scale, bias), torch.tensor([0, 1, 1]), real)
        alone = [
            contrastive_sum(kind, Seen(one[kept], other[kept], scale, bias), torch.arange(2), real[:2])
            for kept in ([0, 1], [0, 2])
        ]
        if kind == "siglip":  # every comparison counts for itself: the first pair is in both
            own = -nn.functional.logsigmoid(5 * (one[0] @ other[0]))
            torch.testing.assert_close(loss, sum(alone) - own)
        assert torch.isfinite(loss)
        assert loss < contrastive_sum(kind, Seen(one, other, scale, bias), torch.arange(3), real)


class Fixed(nn.Module):
    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, images: Tensor, tokens: Tensor, mask: Tensor) -> Seen:
        rows = images.flatten().long()
        return Seen(self.seen.images[rows], self.seen.texts[rows], self.seen.scale, self.seen.bias)


def found(image: list[list[float]], text: list[list[float]], group: list[int]) -> dict[str, float]:
    seen = Seen(torch.tensor(image), torch.tensor(text), torch.tensor(1.0), torch.tensor(0.0))
    rows = torch.arange(len(group))[:, None]
    batch = {
        "images": rows.float(), "tokens": rows, "mask": rows,
        "group": torch.tensor(group), "real": torch.ones(len(group), dtype=torch.bool),
    }  # fmt: skip
    loss = Retrieval("clip", rows=2)(Fixed(seen), batch)
    return {name: float(value) / len(group) for name, value in loss.metrics.items()}


def test_retrieval_counts_what_is_found() -> None:
    image = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]]
    text = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    measured = found(image, text, [0, 1, 2])
    assert measured["image_to_text_at_1"] == pytest.approx(2 / 3)  # the third image is nearest to the second text
    assert measured["text_to_image_at_1"] == 1.0
    assert measured["image_to_text_at_5"] == 1.0


def test_texts_that_are_equal_are_one() -> None:
    measured = found([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [4, 4, 5])
    assert measured["image_to_text_at_1"] == measured["text_to_image_at_1"] == 1.0


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_vectors_that_say_nothing_find_nothing(value: float) -> None:
    measured = found([[value, value]] * 12, [[value, value]] * 12, list(range(12)))
    assert set(measured.values()) == {0.0}
