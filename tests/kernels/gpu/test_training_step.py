"""A decoder's loss and gradients on the Triton-language kernels against the same decoder on torch."""

import pytest
import torch
from torch import Tensor, nn

from penjing.core.layers.settings import MoEConfig
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.kernels.dispatch import force_torch
from penjing.train.objective.objective import IGNORED, CrossEntropy, makes_loss_itself

DENSE = DecoderConfig(
    vocab_size=70,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
EXPERTS = DENSE.model_copy(update={"moe": MoEConfig(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)})


def problem(config: DecoderConfig, device: str) -> tuple[Decoder, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = Decoder(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    batch = {name: torch.randint(0, 70, (2, 9)).to(device) for name in ("tokens", "targets")}
    batch["targets"][0, 3:6] = IGNORED
    return model.to(device), batch


def loss_and_gradients(model: Decoder, batch: dict[str, Tensor]) -> list[Tensor]:
    parameters = list(model.parameters())
    loss = CrossEntropy("tokens", label_smoothing=0.1)(model, batch).total
    return [loss.detach(), *torch.autograd.grad(loss, parameters)]


def test_a_dense_decoder(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = problem(DENSE, gpu_device)
    with force_torch():
        expected = loss_and_gradients(model, batch)
    assert makes_loss_itself(model, batch["targets"])
    monkeypatch.setattr(model.lm_head, "forward", None)  # all logits are never asked for
    for actual, wanted in zip(loss_and_gradients(model, batch), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def test_experts_in_half_precision(gpu_device: str) -> None:
    model, batch = problem(EXPERTS, gpu_device)
    with force_torch():
        expected = loss_and_gradients(model, batch)
        model.half()
        same_type = loss_and_gradients(model, batch)
    for actual, same, wanted in zip(loss_and_gradients(model, batch), same_type, expected, strict=True):
        largest = float(wanted.abs().max())
        assert (actual.float() - wanted).abs().max() <= 2 * (same.float() - wanted).abs().max() + 0.02 * largest


def test_a_head_with_a_format_of_its_own_keeps_its_forward(gpu_device: str) -> None:
    model, batch = problem(DENSE, gpu_device)
    assert makes_loss_itself(nn.Sequential(), batch["targets"]) is False

    class Wrapped(nn.Linear):
        pass

    model.lm_head.__class__ = Wrapped
    assert not makes_loss_itself(model, batch["targets"])
