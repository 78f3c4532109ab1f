"""What becomes a graph where a model is compiled, and that it computes what it did. By default no C++ is made: the
backend "aot_eager" gets the graphs that inductor gets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import cifar_resnet
from penjing.train.monitor.monitor import ActivationRanges
from penjing.train.numerics.compiled import compile_model
from penjing.train.numerics.recompute import apply_recompute
from tests.conftest import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor


def compiled(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    model = copy.deepcopy(model)
    compile_model(model, is_shared=False, backend=backend)
    torch._dynamo.reset()
    counters.clear()
    return model


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def learn(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, float]]:
    """Outputs, gradients and the ranges of activations of a pass that is watched, and of a pass that is not."""
    with ActivationRanges(model) as ranges:
        model(batch).square().mean().backward()
    output = model(batch)
    output.square().mean().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, ranges.values


@pytest.mark.parametrize(
    ("model", "batch", "training", "evaluation"),
    [
        pytest.param(Decoder(tiny_config()), torch.arange(12).view(2, 6), 1, 1, id="blocks share a graph"),
        pytest.param(
            Decoder(
                tiny_config(
                    model_type="penjing",
                    num_hidden_layers=4,
                    layer_types=("short_conv", "short_conv", "full_attention", "short_conv"),
                    conv_taps=3,
                )
            ),
            torch.arange(12).view(2, 6),
            2,
            2,
            id="blocks with convolutions share another",
        ),
        pytest.param(
            ResNet(cifar_resnet(8, width=4)), torch.randn(4, 3, 16, 16), 2, 1, id="the whole, watched and not"
        ),
    ],
)  # fmt: skip
def test_it_computes_the_same_and_is_cut_nowhere(
    model: nn.Module, batch: torch.Tensor, training: int, evaluation: int
) -> None:
    ours = compiled(model)
    assert list(ours.state_dict()) == list(model.state_dict())
    for mine, plain in zip(learn(ours, batch), learn(model, batch), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
    assert graphs() == training
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(batch), model.eval()(batch), atol=1e-5, rtol=1e-4)
    assert graphs() == training + evaluation


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_block_is_computed_again(backend: str) -> None:
    model, batch = Decoder(tiny_config()), torch.arange(12).view(2, 6)
    ours = compiled(model, backend)
    apply_recompute(ours, "full")
    for mine, plain in zip(learn(ours, batch), learn(model, batch), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
    assert graphs() == 1


def test_a_network_that_is_compiled_as_a_whole_is_not_computed_again() -> None:
    with pytest.raises(ConfigError, match="compile takes a network that is no decoder as a whole"):
        compile_model(ResNet(cifar_resnet(8)), is_shared=False, recompute=True)


def test_layers_that_see_unlike_have_a_graph_each() -> None:
    kinds = {"sliding_window": 4, "layer_types": ("sliding_attention", "full_attention") * 2, "num_hidden_layers": 4}
    model = Decoder(tiny_config(model_type="qwen2", **kinds))
    learn(compiled(model), torch.arange(12).view(2, 6))
    assert graphs() == 2


def test_more_unlike_layers_than_torch_compiles_by_itself_have_a_graph_each() -> None:
    widths = (16, 24, 32)
    model = Decoder(tiny_config(num_hidden_layers=len(widths), intermediate_size=widths[-1], intermediate_sizes=widths))
    with torch._dynamo.config.patch(recompile_limit=2):
        learn(compiled(model), torch.arange(12).view(2, 6))
        assert graphs() == len(widths) > torch._dynamo.config.recompile_limit
