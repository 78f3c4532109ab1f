"""Bits a layer: cells and scores against what rounding does, a killed run goes on, a budget becomes an artifact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penjing.compress.decoder.check import int8_needs
from penjing.compress.decoder.settings import Int8Settings, Transform
from penjing.compress.decoder.weights import fake_quantize_activation, quantize_per_channel
from penjing.compress.quantize.bits import GROUPED, choose_kept, kept_by_budget
from penjing.compress.run import run_recipe
from penjing.compress.sensitivity import bits as module
from penjing.compress.sensitivity.bits import DecoderBits, round_rows, rounded, width_scores
from penjing.compress.sensitivity.kinds import TO_BITS
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from tests.compress.conftest import write_recipe

SMALL = DecoderBits.model_validate(
    {
        "widths": (8, 4),
        "windows": 2,
        "window": 32,
        "transform": Transform(search_steps=2),
        "calibration": {"tokens": 128, "window": 64},
    }
)


def test_eight_bits_are_the_runtimes() -> None:
    x = torch.randn(9, 33, generator=torch.Generator().manual_seed(0))
    x[2] = 0
    assert torch.equal(round_rows(x, 8), fake_quantize_activation(x))
    assert torch.equal(round_rows(x, 8), quantize_per_channel(x).dequantize())
    assert round_rows(x, 4).unique().numel() <= 15 * 9


def test_scores_are_squared_directional_derivatives(tiny_checkpoint: Path) -> None:
    model, name = load_model(tiny_checkpoint).model, "model.layers.1.mlp.up_proj"
    tokens = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(1))
    found = width_scores(model, tokens, [name], (8, 4))[name]
    layer, seen = model.get_submodule(name), {}

    def loss(row: int, step: float) -> float:
        """With `step` of the error of 4 bits added to one token's output."""

        def hook(_: object, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
            assert isinstance(layer, torch.nn.Linear)
            seen["error"] = F.linear(round_rows(inputs[0], 4), round_rows(layer.weight, 4)) - y
            moved = y.clone()
            moved[0, row] += step * seen["error"][0, row]
            return moved

        handle = layer.register_forward_hook(hook)
        with torch.no_grad():
            value = F.cross_entropy(model(tokens[:, :-1])[0].double(), tokens[0, 1:], reduction="sum")
        handle.remove()
        return float(value)

    slopes = [(loss(row, 0.05) - loss(row, -0.05)) / 0.1 for row in range(8)]
    assert found["4"] == pytest.approx(sum(slope**2 for slope in slopes) / 2 / 8, rel=0.05)
    assert found["8"] < 0.05 * found["4"]  # a sixteenth of the error, squared


def test_a_result_holds_every_layer_and_goes_on_after_a_kill(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[int] = []
    judge = module.judge_windows

    def dying(*args: torch.Tensor) -> object:
        judged.append(1)
        if len(judged) == 4:
            raise KeyboardInterrupt
        return judge(*args)  # type: ignore[arg-type]  # pyright: ignore

    monkeypatch.setattr(module, "judge_windows", dying)
    out = tmp_path / "bits"
    with pytest.raises(KeyboardInterrupt):
        TO_BITS.measure(tiny_checkpoint, SMALL, out=out)
    assert not out.exists()
    result = TO_BITS.measure(tiny_checkpoint, SMALL, out=out)
    assert len(judged) == 4 + 4  # a baseline and six cells; one was lost
    assert [row["name"] for row in result["rows"]] == ["model.layers.0", "model.layers.1", "lm_head"]
    assert len(result["linears"]) == 15
    for row in result["rows"]:
        eight, four = (cell["loss"] - result["baseline"]["loss"] for cell in row["cells"])
        assert abs(eight) < abs(four)
        assert row["cells"][0]["score"] < row["cells"][1]["score"]
    assert json.loads((out / "sensitivity.json").read_text()) == result
    page = (out / "sensitivity.html").read_text()
    assert "<svg" in page
    assert "model.layers.1.mlp.down_proj" in page
    assert TO_BITS.measure(tiny_checkpoint, SMALL, out=out) == result  # kept
    assert len(judged) == 8
    assert not list(tmp_path.glob(".*"))


def test_other_text_to_calibrate_on_is_another_study(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("zebras and yaks " * 400)
    calibration = SMALL.calibration.model_copy(update={"calibrate": (tmp_path / "mine.txt",)})
    settings = SMALL.model_copy(update={"widths": (4,), "calibration": calibration})
    first = TO_BITS.measure(tiny_checkpoint, settings, out=tmp_path / "bits")
    assert TO_BITS.measure(tiny_checkpoint, settings, out=tmp_path / "bits") == first
    (tmp_path / "mine.txt").write_text("quite another text " * 400)
    with pytest.raises(InputError, match="files that they name"):
        TO_BITS.measure(tiny_checkpoint, settings, out=tmp_path / "bits")


def test_rounding_is_undone(tiny_checkpoint: Path) -> None:
    model, tokens = load_model(tiny_checkpoint).model, torch.arange(16)[None]
    with torch.no_grad():
        before = model(tokens)
        with rounded(model, ["model.layers.0.mlp.up_proj"], 3):
            assert (model(tokens) - before).abs().max() > 1e-3
        assert torch.equal(model(tokens), before)


def test_a_budget_goes_to_the_most_sensitive_for_their_size() -> None:
    rows = [("a", 100, 5.0), ("b", 1000, 20.0), ("c", 100, 1.0), ("d", 800, 0.1)]
    result = {"linears": [{"name": n, "parameters": size, "scores": {"8": score}} for n, size, score in rows]}
    assert choose_kept(result, 8) == []
    assert choose_kept(result, 32) == ["a", "b", "c", "d"]
    assert choose_kept(result, 8 + 24 * 100 / 2000) == ["a"]
    assert choose_kept(result, 8 + 24 * 300 / 2000) == ["a", "c"]  # b does not fit


def test_a_budget_makes_an_artifact_that_everyone_loads(tiny_checkpoint: Path, tmp_path: Path) -> None:
    bits = tmp_path / "bits"
    result = TO_BITS.measure(tiny_checkpoint, SMALL, out=bits)
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "mixed")
    overrides = ["steps.0.effective_bits=12", f'steps.0.sensitivity="{bits}"']
    out = run_recipe(recipe, overrides)
    config = open_checkpoint(out).config_json["quantization_config"]
    assert config["ignore"]
    assert sorted(config["ignore"]) == choose_kept(result, 12)
    model = load_model(out).model
    for name in config["ignore"]:
        assert isinstance(model.get_submodule(name), torch.nn.Linear)
    ids = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(ids).logits
        ours = model(ids)
    assert (ours - theirs).square().mean().sqrt() < 0.1 * theirs.std()
    for changes, said in (
        ({"input": {}}, "another model"),
        ({"kind": "pruning"}, "no scores of 8 bits"),
    ):
        (tmp_path / "other.json").write_text(json.dumps(result | changes))
        with pytest.raises(ConfigError, match=said):
            run_recipe(recipe, [overrides[0], f'steps.0.sensitivity="{tmp_path / "other.json"}"'])
    with pytest.raises(ConfigError, match="with 'penjing compress sensitivity"):
        run_recipe(recipe, [overrides[0], 'steps.0.sensitivity="nowhere"'])
    with pytest.raises(ConfigError, match="go together"):
        run_recipe(recipe, overrides[:1])


def test_a_budget_of_bytes_gives_8_bits_where_4_cost_most(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = TO_BITS.measure(tiny_checkpoint, SMALL, out=tmp_path / "bits")
    config = open_checkpoint(tiny_checkpoint).config
    fours = Int8Settings(weights_bits=4, group=32)
    least = int8_needs(fours, config, 0).artifact

    def resolved(room: float) -> Int8Settings:
        changes = {"budget_mb": (least + room) / 1e6, "sensitivity": tmp_path / "bits"}
        return kept_by_budget(fours.model_copy(update=changes), tiny_checkpoint)

    rows = {row["name"]: row for row in result["linears"] if row["name"] != "lm_head"}
    gains = {name: row["scores"][GROUPED] - row["scores"]["8"] for name, row in rows.items()}
    assert resolved(1e6).keep_int8 == tuple(name for name in rows if gains[name] > 0)
    assert resolved(0.5).keep_int8 == ()
    chosen = resolved(9000)
    used = int8_needs(chosen, config, 0).artifact - least
    assert 0 < used <= 9000
    left = {name: gain for name, gain in gains.items() if name not in chosen.keep_int8}
    swapped = [
        (taken, other)
        for taken in chosen.keep_int8
        for other, gain in left.items()
        if rows[other]["parameters"] == rows[taken]["parameters"] and gain > gains[taken]
    ]
    assert not swapped  # the same bytes would have gained more
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "mixed")
    budget = [f"steps.0.budget_mb={(least + 9000) / 1e6}", f'steps.0.sensitivity="{tmp_path / "bits"}"']
    four = ["steps.0.weights_bits=4", "steps.0.group=32", "steps.0.transform.search_steps=0", *budget]
    out = run_recipe(recipe, [*four, "guard.perplexity_ratio=9"])
    found = {name for name in rows if open_checkpoint(out).tensor_names.count(f"{name}.weight")}
    assert found == set(chosen.keep_int8)
    stored = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert least < stored <= least + 9000
    for changes, said in (
        (["steps.0.budget_mb=0.001"], "is below the .* MB of 4 bits everywhere"),
        (["steps.0.weights_bits=8"], "budget_mb is for weights_bits=4"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_recipe(recipe, [*four, *changes])


def test_wrong_flags_and_networks_are_refused(tiny_checkpoint: Path, tiny_int8: Path) -> None:
    for widths in ("8,8", "4,8", "1", "eight"):
        with pytest.raises(ConfigError, match="width"):
            TO_BITS.settings_of(tiny_checkpoint, {"widths": widths})
    with pytest.raises(InputError, match="quantized already"):
        TO_BITS.measure(tiny_int8, SMALL)
