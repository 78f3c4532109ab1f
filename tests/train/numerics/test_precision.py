from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.train.numerics import precision
from penjing.train.numerics.fp8 import fp8_linear
from penjing.train.numerics.precision import (
    Phase,
    Precision,
    PrecisionConfig,
    Rule,
    allow_tf32,
    apply_environment,
    for_devices,
    set_formats,
    slow_modes,
)
from penjing.train.numerics.recompute import apply_recompute
from tests.conftest import tiny_config

CPU = torch.device("cpu")


def model_of_three() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))


class Formats(TorchFunctionMode):
    """Name of a module → dtype of what it made with its weight."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {
            id(p): name.rpartition(".")[0] for name, p in model.named_parameters() if name.endswith("weight")
        }
        self.seen: dict[str, torch.dtype] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            self.seen["attention"] = output.dtype
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(output, torch.Tensor) and id(value) in self._names:
                self.seen[self._names[id(value)]] = output.dtype
        return output


def formats(model: nn.Module, x: torch.Tensor) -> dict[str, torch.dtype]:
    with Formats(model) as watch:
        model(x)
    return watch.seen


def test_a_mode_is_what_torch_autocast_does() -> None:
    model, x = model_of_three(), torch.randn(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = copy.deepcopy(model)(x).float()
    Precision(model, PrecisionConfig(mode="bf16"), CPU)
    assert torch.equal(model(x), expected)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    model(x).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_the_later_rule_wins_and_covers_what_is_below() -> None:
    model, x = model_of_three(), torch.randn(3, 8)
    rules = (Rule(match="2.0", compute="bf16"), Rule(match="2", compute="fp32"))
    Precision(model, PrecisionConfig(mode="bf16", policy=rules), CPU)
    half, full = torch.bfloat16, torch.float32
    assert formats(model, x) == {"0": half, "1": half, "2.0": full, "2.1": full}
    assert model(x).dtype == full
    Precision(model, PrecisionConfig(mode="bf16", policy=rules[::-1]), CPU)
    seen = formats(model, x)
    assert (seen["2.0"], seen["2.1"]) == (torch.bfloat16, torch.float32)


def test_groups_name_kinds_of_modules() -> None:
    model, x = model_of_three(), torch.randn(3, 8)
    Precision(model, PrecisionConfig(mode="fp32", policy=(Rule(match="linears", compute="bf16"),)), CPU)
    seen = formats(model, x)
    assert [seen[name] for name in ("0", "1", "2.0", "2.1")] == [torch.bfloat16, torch.float32] + [torch.bfloat16] * 2


def test_the_schedule_switches_and_evaluation_is_float32() -> None:
    model, x = model_of_three(), torch.randn(3, 8)
    exact = copy.deepcopy(model)(x)
    config = PrecisionConfig(mode="bf16", schedule=(Phase(until=0.25, mode="fp32"), Phase(until=0.5, mode="fp16")))
    precision = Precision(model, config, CPU)
    modes = []
    for step in range(8):
        precision.switch(step, 8)
        modes.append((precision.mode, formats(model, x)["0"]))
        with precision.evaluation():
            assert torch.equal(model(x), exact)
        assert formats(model, x)["0"] == modes[-1][1]
    assert modes == [("fp32", torch.float32)] * 2 + [("fp16", torch.float16)] * 2 + [("bf16", torch.bfloat16)] * 4


def test_evaluation_leaves_out_the_policy() -> None:
    model, x = model_of_three(), torch.randn(3, 8)
    exact = copy.deepcopy(model)(x)
    config = PrecisionConfig(mode="fp32", policy=(Rule(match="linears", compute="bf16"),))
    with Precision(model, config, CPU).evaluation():
        assert torch.equal(model(x), exact)


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model, x = model_of_three(), torch.randn(3, 8)
    Precision(model, PrecisionConfig(mode="bf16"), CPU)
    teacher = copy.deepcopy(model)
    before = teacher(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(teacher(x), before)
    assert isinstance(model[0], nn.Linear)
    assert list(model.state_dict()) == list(model_of_three().state_dict())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_hybrid_keeps_norms_embeddings_softmax_and_head_in_float32(recompute: str) -> None:
    torch.manual_seed(0)
    model, tokens = Decoder(tiny_config(tie_word_embeddings=False)), torch.arange(10).view(1, 10)
    apply_recompute(model, recompute)  # type: ignore[arg-type]
    half, full = torch.bfloat16, torch.float32
    Precision(model, PrecisionConfig(mode="bf16"), CPU)
    assert formats(model, tokens) | {"attention": half, "lm_head": half} == formats(model, tokens)
    precision = Precision(model, PrecisionConfig(mode="hybrid"), CPU)
    seen = formats(model, tokens)
    assert (seen["attention"], seen["lm_head"], seen["model.norm"], seen["model.embed_tokens"]) == (full,) * 4
    assert seen["model.layers.0.mlp.gate_proj"] == seen["model.layers.0.self_attn.q_proj"] == half
    model(tokens).sum().backward()  # the recomputation finds the same formats, or autograd objects
    with precision.evaluation():
        assert set(formats(model, tokens).values()) == {full}


def test_the_environment_overrides_the_recipe() -> None:
    config = PrecisionConfig(mode="fp16", schedule=(Phase(until=0.1, mode="fp32"),))
    assert apply_environment(config, {}) == config
    changed = apply_environment(
        config,
        {
            "PENJING_PRECISION_MODE": "bf16",
            "PENJING_LOSS_SCALE_WINDOW": "50",
            "PENJING_FP32_OPS": "norms, lm_head",
        },
    )
    assert (changed.mode, changed.schedule, changed.loss_scale_window) == ("bf16", (), 50)
    assert [(rule.match, rule.compute) for rule in changed.policy] == [("norms", "fp32"), ("lm_head", "fp32")]
    assert apply_environment(config, {"PENJING_AMP_ENABLED": "0"}).modes == {"fp32"}
    assert apply_environment(PrecisionConfig(), {"PENJING_AMP_ENABLED": "1"}).mode == "bf16"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PENJING_AMP_ENABLED", "yes", "write 0 or 1"),
        ("PENJING_PRECISION_MODE", "fp4", "choose one of auto, fp32, tf32, bf16, fp16, hybrid"),
        ("PENJING_LOSS_SCALE_WINDOW", "0", "a number of steps"),
    ],
)
def test_a_wrong_environment_variable_is_named(variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}={value}: .*{says}"):
        apply_environment(PrecisionConfig(), {variable: value})


def test_what_the_hardware_lacks_is_refused() -> None:
    model = model_of_three()
    with pytest.raises(
        ConfigError, match=r"precision.mode = 'tf32' needs an NVIDIA GPU.*on a CPU; use 'fp32' or 'bf16'"
    ):
        Precision(model, PrecisionConfig(mode="tf32"), CPU)
    with pytest.raises(ConfigError, match=r"asks for fp8, which needs .* 8.9 or more"):
        Precision(model, PrecisionConfig(policy=(Rule(match="linears", compute="fp8"),)), CPU)
    with pytest.raises(ConfigError, match=r"'nothing' is no group .* and matches no module; modules are called 0, 1"):
        Precision(model, PrecisionConfig(policy=(Rule(match="nothing", compute="bf16"),)), CPU)


def test_fp8_linear_is_within_its_rounding_of_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 64, requires_grad=True)
    weight, bias = (torch.randn(32, 64) / 8).requires_grad_(), torch.randn(32, requires_grad=True)
    y = fp8_linear(x, weight, bias)
    upstream = torch.randn(2, 16, 32)
    (y.float() * upstream).sum().backward()
    ours = [x.grad, weight.grad, bias.grad]
    x.grad = weight.grad = bias.grad = None
    exact = F.linear(x, weight, bias)
    (exact * upstream).sum().backward()
    assert (y - exact).norm() / exact.norm() < 0.05  # two E4M3 roundings of 2^-4 relative error at most
    for mine, theirs in zip(ours, [x.grad, weight.grad, bias.grad], strict=True):
        assert mine is not None
        assert theirs is not None
        assert (mine - theirs).norm() / theirs.norm() < 0.08  # E5M2 gradients: 2^-3 at most


def test_fp8_scales_follow_the_largest_value() -> None:
    x, weight = torch.randn(16, 32), torch.randn(16, 32)
    small = fp8_linear(x * 1e-6, weight * 1e4, None).float()
    assert torch.allclose(small, fp8_linear(x, weight, None).float() * 1e-2, rtol=2e-2, atol=1e-4)
    assert torch.equal(fp8_linear(torch.zeros(16, 32), weight, None), torch.zeros(16, 16, dtype=torch.bfloat16))


def test_fp8_is_a_format_of_linear_modules() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(32, 16)
    linear = nn.Sequential(inner)
    x = torch.randn(16, 32)
    set_formats(linear, "fp32", (Rule(match="linears", compute="fp8"),), "cpu")
    assert torch.equal(linear(x), fp8_linear(x, inner.weight, inner.bias))


def test_auto_is_what_the_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrecisionConfig(mode="auto", schedule=(Phase(until=0.5, mode="auto"), Phase(until=0.7, mode="fp16")))
    for supported, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device, supported=supported: supported)
        chosen = for_devices(config, supported)
        assert (chosen.mode, [phase.mode for phase in chosen.schedule]) == (expected, [expected, "fp16"])
        assert Precision(model_of_three(), PrecisionConfig(mode="auto"), CPU).mode == expected
        slow = slow_modes(PrecisionConfig(mode="hybrid"), CPU)
        assert slow == "" if supported else "precision.mode = 'hybrid' is up to 100 times slower" in slow
        assert "'fp16'" in slow_modes(chosen, CPU)


@pytest.fixture
def float32_products() -> Iterator[None]:
    """What the test sets of float32's products is set back."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.usefixtures("float32_products")
def test_torch_s_compiler_can_ask_for_tf32_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; nothing is computed. The compiler asks by older names than those that torch recommends to set."""
    from torch._inductor.select_algorithm import create_precompile_key

    modes = Precision(nn.Linear(2, 2), PrecisionConfig(mode="fp32"), CPU)
    monkeypatch.setattr(modes, "_device", torch.device("cuda"))
    for mode in ("tf32", "bf16", "tf32", "fp32", "tf32"):
        modes._enter(mode)
        wide = mode == "tf32"
        assert create_precompile_key("mm", "", []) == f"mm::{'high' if wide else 'highest'}"
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == wide
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if wide else "ieee")
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") == wide  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.full
@pytest.mark.usefixtures("float32_products")
def test_a_model_compiles_after_tf32_was_allowed() -> None:
    allow_tf32(True)
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    compiled = torch.compile(layer, mode="max-autotune-no-cudagraphs")
    torch.testing.assert_close(compiled(x), layer(x))
