from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penjing.core.errors import InputError
from penjing.core.models.decoder import Decoder
from penjing.train.loop import Evaluation, Trainer
from penjing.train.monitor.alarms import AlarmConfig, AlarmError, Alarms
from penjing.train.monitor.monitor import Monitor
from penjing.train.numerics.recompute import apply_recompute
from penjing.train.objective.objective import IGNORED, Batch, CrossEntropy, Loss
from penjing.train.optim.clip import ClipConfig, GradientNorms
from penjing.train.optim.loss_scale import LossScale
from penjing.train.optim.optimizer import AveragedWeights, OptimizerConfig, build_optimizer
from penjing.train.optim.schedule import LearningRate
from penjing.train.processes.stop import InterruptedRunError
from penjing.train.processes.world import World
from penjing.train.state.initial import decoder_weights, fill_weights
from penjing.train.state.state import load_model_state, model_state
from tests.conftest import tiny_config
from tests.train.conftest import ListStream, token_batch


def tiny_decoder(**overrides: object) -> Decoder:
    model = Decoder(tiny_config(**overrides))
    fill_weights(model, decoder_weights(0.05, model.config.num_hidden_layers, seed=7))
    return model


def split(batch: Batch, parts: int) -> list[Batch]:
    return [
        dict(zip(batch, tensors, strict=True))
        for tensors in zip(*(x.chunk(parts) for x in batch.values()), strict=True)
    ]


def trainer_of(model: nn.Module, batches: list[Batch], steps: int = 1, **fields: object) -> Trainer:
    optimizer = fields.pop("optimizer", None) or torch.optim.SGD(model.parameters(), 0.0)
    return Trainer(model, CrossEntropy(), ListStream(batches), optimizer, steps, **fields)  # type: ignore[arg-type]


class GradientProbe(torch.optim.SGD):
    """Keeps the gradients that the update was given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.0)
        self.seen: list[dict[str, torch.Tensor]] = []
        self._named = dict(model.named_parameters())

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.seen.append({name: p.grad.clone() for name, p in self._named.items() if p.grad is not None})


def test_fifty_steps_equal_a_plain_loop_with_transformers_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_with_min_lr_schedule_with_warmup

    model = tiny_decoder(tie_word_embeddings=False)
    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=512, rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
    )  # fmt: skip
    theirs.load_state_dict(model.state_dict())
    batches = [token_batch(4, 32, seed) for seed in range(5)]
    steps, warmup, peak = 50, 5, 3e-3

    decay = [p for p in theirs.parameters() if p.dim() >= 2]
    rest = [p for p in theirs.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=peak, betas=(0.9, 0.95)
    )
    schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps - 1, min_lr_rate=0.1)
    their_losses = []
    for step in range(steps):
        # transformers counts the warm-up from 0, which wastes the first update; penjing begins at 1.
        rate = peak * (step + 1) / warmup if step < warmup else schedule.get_last_lr()[0]
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = batches[step % 5]
        loss = F.cross_entropy(theirs(batch["tokens"]).logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        their_losses.append(loss.item())

    seen: list[float] = []
    monitor = Monitor(Alarms(AlarmConfig()))
    monitor.on_step = lambda step, steps, values, *rest: seen.append(values["loss"])  # type: ignore[method-assign]
    trainer_of(
        model, batches, steps, optimizer=build_optimizer(model, OptimizerConfig()), monitor=monitor,
        rate=LearningRate(peak=peak, warmup=warmup / steps), norms=GradientNorms(ClipConfig(norm=1.0)),
    ).fit()  # fmt: skip
    assert seen[-1] < seen[0] - 0.3
    assert max(abs(ours - other) for ours, other in zip(seen, their_losses, strict=True)) <= 1e-4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ragged", [False, True])
def test_gradients_do_not_depend_on_how_a_step_is_cut(accumulation: int, ragged: bool, recompute: str) -> None:
    batch = token_batch(6, 20, 1, ragged=ragged)
    reference = tiny_decoder()
    logits = reference(batch["tokens"])
    F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED).backward()

    model = tiny_decoder()
    apply_recompute(model, recompute)  # type: ignore[arg-type]
    probe = GradientProbe(model)
    trainer_of(model, split(batch, accumulation), optimizer=probe, accumulation=accumulation).fit()
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(probe.seen[0][name], parameter.grad, rtol=0, atol=1e-6), name
    assert max(gradient.abs().max() for gradient in probe.seen[0].values()) > 1e-2  # so that 1e-6 means something


def test_padding_rows_change_nothing() -> None:
    batch = token_batch(3, 16, 2)
    padded = {
        "tokens": F.pad(batch["tokens"], (0, 5, 0, 2)),
        "targets": F.pad(batch["targets"], (0, 5, 0, 2), value=IGNORED),
    }
    gradients = []
    for given in (batch, padded):
        model = tiny_decoder()
        probe = GradientProbe(model)
        trainer_of(model, [given], optimizer=probe).fit()
        gradients.append(probe.seen[0])
    assert all(torch.allclose(gradients[0][name], gradients[1][name], rtol=0, atol=1e-6) for name in gradients[0])


def test_a_step_without_targets_is_refused() -> None:
    batch = token_batch(2, 8, 0)
    batch["targets"].fill_(IGNORED)
    with pytest.raises(InputError, match=r"step 1: every target of the batch is ignored"):
        trainer_of(tiny_decoder(), [batch]).fit()


class Scaled(nn.Module):
    """w · x; a hostile batch makes its gradient overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Total:
    def count(self, batch: Batch) -> int:
        return len(batch["x"])

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        return Loss(model(batch["x"]).sum())


def hostile_trainer(values: list[float], action: str = "stop", **fields: object) -> Trainer:
    model = Scaled()
    stream = ListStream([{"x": torch.full((1, 2), value)} for value in values])
    monitor = Monitor(Alarms(AlarmConfig(nonfinite=action)))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return Trainer(
        model, Total(), stream, optimizer, len(values), rate=LearningRate(kind="constant", peak=1.0, warmup=0),
        monitor=monitor, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def test_nan_in_the_data_is_named() -> None:
    trainer = hostile_trainer([1.0, math.nan])
    with pytest.raises(InputError, match=r"step 2: the data hold NaN or infinity \('x' of the batch\)"):
        trainer.fit()
    assert trainer.model.get_parameter("weight").tolist() == [0.0, 0.0]  # the good update only


def test_a_gradient_that_overflows_skips_the_update_and_stops_the_run() -> None:
    trainer = hostile_trainer([1.0, 3e38])
    with pytest.raises(AlarmError, match=r"alarm nonfinite at step 2: .*alarms.nonfinite = 'stop'"):
        trainer.fit()
    assert trainer.model.get_parameter("weight").tolist() == [0.0, 0.0]


def test_an_alarm_that_only_logs_lets_the_run_go_on() -> None:
    trainer = hostile_trainer([1.0, 3e38, 1.0], action="log")
    trainer.fit()
    assert trainer.step == 3
    assert trainer.model.get_parameter("weight").tolist() == [-1.0, -1.0]


def test_evaluation_is_plain_averaged_and_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    batch = {"images": torch.randn(5, 4), "targets": torch.tensor([0, 1, 2, IGNORED, 1])}
    average = AveragedWeights(model, 0.5)
    shadow = copy.deepcopy(model)
    objective = CrossEntropy("images", label_smoothing=0.3, accuracy=True)
    trainer = Trainer(
        model, objective, ListStream([batch]), torch.optim.SGD(model.parameters(), 0.1), 3, average=average,
        evaluation=Evaluation(lambda: [batch], objective.evaluation(), 3), rate=LearningRate(kind="constant", warmup=0),
    )  # fmt: skip
    hook_steps: list[int] = []

    def average_by_hand(step: int) -> None:
        hook_steps.append(step)
        with torch.no_grad():
            for mine, live in zip(shadow.parameters(), model.parameters(), strict=True):
                mine.lerp_(live, 0.5)

    trainer.after_update = (average_by_hand,)
    result = trainer.fit()
    assert hook_steps == [1, 2, 3]
    logits = shadow.eval()(batch["images"])
    assert result["loss"] == pytest.approx(
        F.cross_entropy(logits, batch["targets"], ignore_index=IGNORED).item(), abs=1e-6
    )
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == batch["targets"]).sum().item() / 4)
    assert model.training


def test_the_state_of_another_model_is_refused() -> None:
    state = {name: tensor.clone() for name, tensor in model_state(tiny_decoder()).items()}
    with pytest.raises(
        InputError, match=r"'model.embed_tokens.weight' has shape \(320, 64\), this model's \(320, 32\)"
    ):
        load_model_state(tiny_decoder(hidden_size=32, head_dim=8), state)
    with pytest.raises(InputError, match=r"lacks the tensor 'model.layers.2.*another model"):
        load_model_state(tiny_decoder(num_hidden_layers=3), state)


def test_float16_skips_overflows_and_finds_a_scale_that_works() -> None:
    from penjing.train.numerics.precision import Precision, PrecisionConfig

    model = tiny_decoder()
    scale = LossScale(2.0**24, window=2)
    trainer = trainer_of(
        model, [token_batch(2, 16, 0)], 12, optimizer=torch.optim.SGD(model.parameters(), 1e-2), loss_scale=scale,
        precision=Precision(model, PrecisionConfig(mode="fp16"), torch.device("cpu")),
    )  # fmt: skip
    before = model.lm_head.weight.detach().clone()
    trainer.fit()
    assert scale.num_changes >= 2
    assert scale.value < 2.0**24
    assert not torch.equal(before, model.lm_head.weight)


def test_the_loss_is_scaled_where_a_rule_alone_computes_in_float16() -> None:
    from penjing.train.numerics.precision import Phase, Precision, PrecisionConfig, Rule

    rule = Rule(match="*.mlp", compute="fp16")
    half, whole = (Phase(until=0.5, mode=mode) for mode in ("fp16", "fp32"))
    for config, scaled in (
        (PrecisionConfig(policy=(rule,)), [True, True]),
        (PrecisionConfig(policy=(rule,), schedule=(whole,)), [True, True]),
        (PrecisionConfig(policy=(rule.model_copy(update={"compute": "bf16"}),)), [False, False]),
        (PrecisionConfig(schedule=(half,)), [True, False]),
    ):
        model, scale, seen = tiny_decoder(), LossScale(64.0), list[bool]()
        trainer = trainer_of(
            model, [token_batch(2, 16, 0)], 2, loss_scale=scale,
            precision=Precision(model, config, torch.device("cpu")),
            after_update=(lambda step, scale=scale, seen=seen: seen.append(scale.value == 64.0),),
        )  # fmt: skip
        trainer.fit()
        assert seen == scaled


class OtherProcess(World):
    """A world whose other process always reports one flag: -1 the overflow of a gradient, -2 the wish to stop."""

    flag: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        if values.dtype == torch.float64 and values.numel() > 2:
            values[self.flag] += 1
        return values


def test_an_overflow_in_another_process_skips_the_update_here() -> None:
    from penjing.train.numerics.precision import Precision, PrecisionConfig

    model, world = tiny_decoder(), OtherProcess()
    object.__setattr__(world, "flag", -1)
    scale = LossScale(64.0)
    before = model.lm_head.weight.detach().clone()
    precision = Precision(model, PrecisionConfig(mode="fp16"), torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    trainer_of(
        model, [token_batch(2, 16, 0)], 3, optimizer=optimizer, loss_scale=scale, world=world, precision=precision
    ).fit()
    assert scale.value == 8.0
    assert torch.equal(before, model.lm_head.weight)


def test_a_stop_asked_of_another_process_stops_this_one() -> None:
    world = OtherProcess()
    object.__setattr__(world, "flag", -2)
    trainer = trainer_of(tiny_decoder(), [token_batch(2, 16, 0)], 3, world=world)
    with pytest.raises(InterruptedRunError, match="stopped at step 1 as asked"):
        trainer.fit()


class MeanOfTwo(World):
    """Two processes, the other of which has ones wherever this one sums."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.add_(1)


def test_running_statistics_are_averaged_over_processes_before_they_are_used() -> None:
    norm = nn.BatchNorm2d(2)
    buffers = dict(norm.named_buffers())
    buffers["running_mean"].fill_(3.0)
    buffers["num_batches_tracked"].fill_(9)
    MeanOfTwo(size=2).average_buffers(nn.Sequential(nn.Conv2d(1, 2, 3), norm))
    assert buffers["running_mean"].tolist() == [2.0, 2.0]
    assert buffers["running_var"].tolist() == [1.0, 1.0]
    assert buffers["num_batches_tracked"] == 9

    class Seen(World):
        def average_buffers(self, model: nn.Module) -> None:
            calls.append("average")

    calls: list[str] = []
    batch = token_batch(2, 16, 0)

    def held_out() -> list[Batch]:
        calls.append("evaluate")
        return [batch]

    evaluation = Evaluation(held_out, CrossEntropy(), 1)
    trainer_of(tiny_decoder(), [batch], 1, world=Seen(), evaluation=evaluation).fit()
    assert calls == ["average", "evaluate", "average"]  # before evaluation, and before the checkpoint


def test_dropout_resumes_with_the_same_dice() -> None:
    def trainer(steps: int) -> tuple[Trainer, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        batches = [{"images": torch.randn(4, 6), "targets": torch.tensor([0, 1, 2, 0])} for _ in range(3)]
        losses: list[float] = []
        monitor = Monitor(Alarms(AlarmConfig()))
        monitor.on_step = lambda step, steps, values, *rest: losses.append(values["loss"])  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters())
        made = Trainer(model, CrossEntropy("images"), ListStream(batches), optimizer, 9, monitor=monitor, seed=5)
        made.steps, made.rate = steps, LearningRate(kind="constant", warmup=0)
        return made, losses

    whole, expected = trainer(9)
    whole.fit()
    first, early = trainer(4)
    first.fit()
    state = copy.deepcopy(first.state_dict())
    torch.manual_seed(999)
    second, late = trainer(9)
    second.load_state_dict(state)
    second.fit()
    assert early + late == expected
    assert len(set(expected)) == 9
