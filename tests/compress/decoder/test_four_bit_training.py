"""Training a decoder with 4-bit weights: layers equal the runtime's, step 0 is the calibrated artifact, codes stay on
their grid, a killed run goes on to the same artifact, and other programs read it."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.compress.decoder.int4 import (
    LEAST_SCALE,
    GroupedWeight,
    group_range,
    group_scale,
    quantize_grouped,
)
from penjing.compress.decoder.layer import quantized_tensors
from penjing.compress.decoder.parity import fake_quantized_logits
from penjing.compress.decoder.qat import RoundedLinear, apply_rounding, begin_all, rounded_layers
from penjing.compress.decoder.weights import quantize_per_channel
from penjing.compress.exports import export_artifact
from penjing.compress.quantizers.decoder import RoundedTask
from penjing.compress.rounding.stepped import SteppedWeight, quantize_stepped
from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.core.runtime.quantized import Int4Linear, Int8Linear
from penjing.core.runtime.schemes import INT8, Scheme
from penjing.kernels.int4_linear import pack_int4, unpack_int4
from penjing.train.processes.stop import InterruptedRunError
from tests.compress.decoder.language import learn, successors

AROUND, OFFSETS, STEPS = Scheme(4, 32), Scheme(4, 32, offsets=True), Scheme(4, 32, steps=True)
GRIDS = [AROUND, OFFSETS, STEPS]
SCHEMES = [
    *GRIDS,
    Scheme(4, 64, activation_bits=16),
    Scheme(4, 32, offsets=True, activation_bits=16),
    Scheme(4, 32, steps=True, zero_points=True),
]
FOUR = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.offsets=true", "steps.0.transform.search_steps=4"]
FOUR += ["steps.0.keep_int8=['*.1.mlp.down_proj']", "guard.perplexity_ratio=9"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(weight: Tensor, scheme: Scheme) -> GroupedWeight | SteppedWeight:
    if scheme.steps:
        return quantize_stepped(weight, scheme.group, torch.ones(weight.shape[1]))
    fit = group_range if scheme.offsets else group_scale
    return quantize_grouped(weight, scheme.group, torch.ones(weight.shape[1]), fit)


def found_of(made: RoundedLinear) -> GroupedWeight | SteppedWeight:
    found = made.quantized()
    assert isinstance(found, GroupedWeight | SteppedWeight)
    return found


def numbers(stored: GroupedWeight | SteppedWeight) -> Tensor:
    """The integers in [−8, 7]."""
    return stored.number_NK if isinstance(stored, SteppedWeight) else stored.weight_NK


def apart(stored: GroupedWeight | SteppedWeight) -> Tensor:
    """(N, G) how far neighbours of the grid are from each other."""
    return stored.step_NG * stored.scale_N1 if isinstance(stored, SteppedWeight) else stored.scale_NG.float()


def layer(scheme: Scheme) -> tuple[RoundedLinear, Tensor, GroupedWeight | SteppedWeight]:
    weight = draw(12, 128)
    weight[3], weight[4, 32:64] = 0.0, 0.25
    stored = grouped(weight, scheme)
    made = RoundedLinear(128, 12, bias=True, scheme=scheme)
    made.begin(weight, stored)
    return made, weight, stored


def disturb(made: RoundedLinear, seed: int) -> None:
    """Updates far longer than an optimiser's."""
    with torch.no_grad():
        for place, parameter in enumerate(made.parameters()):
            parameter.add_(draw(*parameter.shape, seed=seed + place), alpha=0.1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_computes_what_the_runtime_computes_of_its_integers(scheme: Scheme) -> None:
    made, weight, stored = layer(scheme)
    x = draw(5, 3, 128, seed=1) * 3
    x[0, 0] = 0
    for seed in (None, 7):
        if seed is not None:
            disturb(made, seed)
        found = found_of(made)
        if seed is None:
            assert torch.equal(made.rounded_weight(), stored.dequantize()), "step 0 is what was calibrated"
        if isinstance(found, SteppedWeight):
            runtime = Int8Linear(found.stored, found.scale_N1, made.bias, scheme.zero_points)
        else:
            runtime = Int4Linear(found.packed(), found.scale_NG, made.bias, found.offset_NG, scheme.activation_bits)
        with torch.no_grad():
            torch.testing.assert_close(made(x), runtime(x), rtol=1e-5, atol=1e-4)
            assert torch.equal(made.rounded_weight(), found.dequantize())
            assert (made(x) - F.linear(x, weight, made.bias)).abs().max() > 1e-2  # it does round


@pytest.mark.parametrize("scheme", GRIDS)
def test_a_layer_begins_with_the_integers_it_is_given(scheme: Scheme) -> None:
    _, weight, stored = layer(scheme)
    numbers(stored)[:, ::3] = (numbers(stored)[:, ::3] + 1).clamp(-8, 7)  # as compensation would
    made = RoundedLinear(128, 12, bias=False, scheme=scheme)
    made.begin(weight, stored)
    found = found_of(made)
    for field in fields(stored):
        given, kept = getattr(stored, field.name), getattr(found, field.name)
        assert given is kept is None or (torch.equal(given, kept) and given.dtype == kept.dtype)
    scale = apart(stored).repeat_interleave(32, 1)
    moved = made.weight / made.unit * scale - (weight - (stored.dequantize() - numbers(stored) * scale))
    assert (moved[:, 1::3].abs() < 1e-5).float().mean() > 0.9  # the others keep their float values


@pytest.mark.parametrize("scheme", GRIDS)
def test_codes_and_scales_stay_storable_whatever_training_does(scheme: Scheme) -> None:
    made, _, _ = layer(scheme)
    for seed in range(20):
        disturb(made, 10 * seed)
        found = found_of(made)
        packed = pack_int4(numbers(found))  # refuses what 4 bits do not hold
        assert torch.equal(unpack_int4(packed), numbers(found))
        if isinstance(found, SteppedWeight):
            assert found.stored.group == 32  # refuses what INT8 does not hold
        if (made.growth.abs() < 1).all():  # e^10 of a scale is more than an optimiser will ever do
            assert torch.isfinite(apart(found)).all()
            assert (apart(found) > 0).all()
    if scheme.offsets:
        with torch.no_grad():
            made.growth.fill_(-5.0)
        assert float(made.grid()[0].detach().min()) == LEAST_SCALE


@pytest.mark.parametrize("scheme", GRIDS)
def test_gradients_are_those_of_the_integers_and_of_the_grid(scheme: Scheme) -> None:
    made, _, stored = layer(scheme)
    made.weight.data[0, 0] = 1.0  # clipped
    upstream = draw(12, 128, seed=5)
    (made.rounded_weight() * upstream).sum().backward()
    scale = apart(stored)
    by_group = upstream.unflatten(1, (4, 32))
    codes = made.values.store(made.weight / made.unit).unflatten(1, (4, 32))
    steps = codes + 8 if scheme.offsets else codes
    grown = (by_group * steps).sum(-1) * scale
    if scheme.steps:  # a row's scale, of all that is multiplied by it
        grown = (upstream * made.rounded_weight().detach()).sum(-1, keepdim=True)
    assert made.weight.grad is not None
    assert made.growth.grad is not None
    wanted = upstream * scale.repeat_interleave(32, 1) / made.unit
    wanted[0, 0] = 0
    torch.testing.assert_close(made.weight.grad, wanted)
    torch.testing.assert_close(made.growth.grad, grown * made.rate, rtol=1e-4, atol=1e-4)
    if scheme.offsets or scheme.steps:
        assert made.shift.grad is not None
        torch.testing.assert_close(made.shift.grad, by_group.sum(-1) * scale * 80.0, rtol=1e-4, atol=1e-4)


@pytest.mark.xdist_group("taught")
@pytest.mark.parametrize("scheme", GRIDS)
def test_training_beats_the_calibrated_start_on_what_it_never_saw(scheme: Scheme, taught: Any) -> None:
    """Nats a token from the floating network's answers."""
    stored: dict[str, Tensor] = {}
    schemes: dict[str, Scheme] = {}
    for name, linear in taught.named_modules():
        if isinstance(linear, torch.nn.Linear):
            eight = name == "lm_head"
            schemes[name] = INT8 if eight else scheme
            weight = linear.weight.detach()
            stored |= quantized_tensors(name, quantize_per_channel(weight) if eight else grouped(weight, scheme))
    model = copy.deepcopy(taught)
    apply_rounding(model, schemes)
    begin_all(model, taught, stored.__getitem__)

    def divergence(x: Tensor) -> Tensor:
        wanted, found = (each(x).flatten(0, 1).log_softmax(-1) for each in (taught, model))
        return F.kl_div(found, wanted, log_target=True, reduction="batchmean")

    unseen = successors(64, 10**6)
    with torch.no_grad():
        before = float(divergence(unseen))
    learn(model, 40, 5e-5, divergence)
    with torch.no_grad():
        after = float(divergence(unseen))
    assert after < 0.75 * before, (after, before)


def losses(out: Path) -> dict[str, Any]:
    return json.loads((out / "report.json").read_text())["stages"][-1]["record"]["training"]["losses"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(["steps.0.offsets=false"], marks=pytest.mark.full),
        pytest.param(["steps.0.activations_bits=16"], marks=pytest.mark.full),
        ["steps.0.offsets=false", "steps.0.scales=whole", "steps.0.zero_points=['*.down_proj']"],
    ],
)
def test_a_step_trains_an_artifact_with_its_gate_and_its_table(
    more: list[str],
    write: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: dict[str, dict[str, Tensor]] = {}
    original = RoundedTask.initialize

    def watched(self: RoundedTask, model: Any) -> None:
        original(self, model)
        for name, made in rounded_layers(model).items():
            for tensor, found in quantized_tensors(name, made.quantized()).items():
                assert torch.equal(found, self._decoder.stored(tensor)), tensor
        begun["table"] = {"rows": model.model.embed_tokens.weight.detach().clone()}

    monkeypatch.setattr(RoundedTask, "initialize", watched)
    out = run_recipe(write("int4", 8), [*FOUR, "steps.0.embedding_dtype=int8", *more])
    verify_artifact(out, Silent())
    assert losses(out)["last"]["divergence"] < 1.5 * losses(out)["first"]["divergence"]  # of other rows
    folder = open_checkpoint(out)
    assert folder.dtype("lm_head.weight") == folder.dtype("model.layers.1.mlp.down_proj.weight") == "I8"
    assert folder.dtype("model.layers.0.mlp.down_proj.weight_packed") == "I32"
    assert load_model(out).scheme == "int4"
    table = folder.get("model.embed_tokens.weight").float() * folder.get("model.embed_tokens.weight_scale")
    assert torch.equal(table, begun["table"]["rows"])  # it does not learn
    ids = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = load_model(out).model(ids)
    assert (ours - fake_quantized_logits(folder, ids)).abs().median() < 1e-4


@pytest.mark.parametrize("scales", ["float", "whole"])
def test_other_programs_read_what_was_trained(scales: str, write: Any, tmp_path: Path) -> None:
    out = run_recipe(write("int4", 4), [*FOUR, "steps.0.offsets=false", f"steps.0.scales={scales}"])
    export_artifact(out, "compressed-tensors", tmp_path / "exported", force=False, progress=Silent())
    record = json.loads((tmp_path / "exported/export.json").read_text())
    assert record["unmeasured"] == {}
    assert 0 < record["differences"][0]["mean"] < record["bound"]["value"]


def test_a_scale_that_was_learnt_is_rounded_in_gguf(write: Any, tmp_path: Path) -> None:
    import gguf
    from gguf.quants import dequantize

    out = run_recipe(write("int4", 4), [*FOUR, "steps.0.offsets=false", "steps.0.scales=whole"])
    export_artifact(out, "gguf", tmp_path / "out.gguf", force=False, progress=Silent())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    found = tensors["blk.0.ffn_up.weight"]
    assert found.tensor_type.name == "Q4_1"
    assert "those of 4 bits too where they were trained" in (tmp_path / "out.gguf.json").read_text()
    layer = load_model(out).model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, Int8Linear)
    wanted = layer.packed.weight_NK.float() * layer.packed.scale_N[:, None]
    near = torch.from_numpy(dequantize(found.data, found.tensor_type).copy())
    assert not torch.equal(near, wanted)  # so that the next line means something
    assert (near - wanted).abs().max() < 2**-9 * wanted.abs().max()


def test_a_killed_training_goes_on_to_the_same_artifact(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Tensor] = []
    initialize = RoundedTask.initialize

    def watched(self: RoundedTask, model: Any) -> None:
        initialize(self, model)
        made = rounded_layers(model)["model.layers.0.mlp.up_proj"].quantized()
        begun.append(quantized_tensors("up_proj", made)["up_proj.weight_scale"])

    monkeypatch.setattr(RoundedTask, "initialize", watched)
    whole = run_recipe(write("whole", 8), FOUR)
    recipe, original = write("killed", 8), RoundedTask.after_update

    def stopping(self: RoundedTask, model: Any, world: Any) -> Any:
        def stop(step: int) -> None:
            if step == 6:  # the newest state is that of step 4
                raise InterruptedRunError("stopped; go on")

        return (*original(self, model, world), stop)

    with monkeypatch.context() as patched:
        patched.setattr(RoundedTask, "after_update", stopping)
        with pytest.raises(InterruptedRunError):
            run_recipe(recipe, FOUR)
    killed = run_recipe(recipe, FOUR)
    first, second = open_checkpoint(whole), open_checkpoint(killed)
    assert first.tensor_names == second.tensor_names
    assert all(torch.equal(first.get(name), second.get(name)) for name in first.tensor_names)
    learnt = first.get("model.layers.0.mlp.up_proj.weight_scale")
    assert learnt.shape == begun[0].shape
    assert not torch.equal(learnt, begun[0])  # so that equality above means something


def test_offsets_of_whole_steps_are_refused(write: Any) -> None:
    with pytest.raises(ConfigError, match="training moves offsets"):
        run_recipe(write("refused", 4), [*FOUR, "steps.0.offsets=whole"])
