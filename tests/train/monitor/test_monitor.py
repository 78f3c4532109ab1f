from __future__ import annotations

import json
import math
import re
import socket
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from penjing.core.config import parse_config
from penjing.core.errors import SetupError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Silent
from penjing.train.monitor.alarms import AlarmConfig, AlarmError, Alarms
from penjing.train.monitor.flops import _cpu_attention_flops, forward_flops, peak_flops
from penjing.train.monitor.monitor import ActivationRanges, Monitor, MonitorConfig, open_sinks
from penjing.train.monitor.sinks import JsonLines, Prometheus, Record, TensorBoard, drop_later
from penjing.train.monitor.summary import summary
from penjing.train.objective.objective import CrossEntropy
from tests.conftest import tiny_config
from tests.disk import run_in
from tests.train.conftest import token_batch


class Kept:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None: ...


class Told(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def status(self, text: str) -> None:
        self.lines.append(text)


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def values(loss: float) -> Record:
    return {"loss": loss, "gradient_norm": 1.0, "learning_rate": 1e-3}


def test_records_carry_rates_every_so_often() -> None:
    kept = Kept()
    monitor = Monitor(Alarms(AlarmConfig()), [kept], every=3, unit="tokens", flops_per_unit=2.0, peak_flops=1e12)
    monitor.start(0, 7)
    for step in range(1, 8):
        monitor.on_step(step, 7, values(1.0), 50, 0.0, False)
    assert [record["step"] for record in kept.records] == [1, 3, 6, 7]
    record = kept.records[-1]
    assert record["tokens_per_s"] * record["step_s"] == pytest.approx(50, rel=1e-6)
    assert record["mfu"] == pytest.approx(3 * 2.0 * record["tokens_per_s"] / 1e12)
    assert 0 < record["memory_share"] < 1


def test_what_is_learnt_of_what_is_computed_is_told_apart() -> None:
    kept, told = Kept(), Told()
    monitor = Monitor(Alarms(AlarmConfig()), [kept], every=1, unit="tokens", flops_per_unit=2.0, progress=told)
    monitor.start(0, 2)
    monitor.on_step(1, 2, values(1.0) | {"count": 50}, 50, 0.0, False)
    monitor.on_step(2, 2, values(1.0) | {"count": 10}, 50, 0.0, False)
    whole, part = kept.records
    assert "learnt_tokens_per_s" not in whole
    assert part["learnt_tokens_per_s"] == pytest.approx(part["tokens_per_s"] / 5)
    assert re.search(r" [\d,]+ tokens/s MFU ", told.lines[0])
    assert re.search(r" [\d,]+ tokens/s \([\d,]+ learnt\) MFU ", told.lines[1])
    assert (monitor.count, monitor.learnt) == (100, 60)
    assert re.search(
        r"tokens/s \([\d,]+ learnt\), MFU", summary(Path("o"), Path("r"), 2, 1.0, monitor, "tokens", {}, "")
    )


@pytest.mark.parametrize(
    ("means", "has"), [({"loss": 1.0}, True), ({"loss": 0.1, "ended": 1.0, "divergence": 0.1}, False)]
)
def test_a_divergence_has_no_perplexity(means: dict[str, float], has: bool) -> None:
    monitor = Monitor(Alarms(AlarmConfig()), [], every=1, unit="tokens", flops_per_unit=2.0, progress=Told())
    assert ("perplexity" in summary(Path("o"), Path("r"), 1, 1.0, monitor, "tokens", means, "")) == has


@pytest.mark.parametrize("interim", [False, True])
def test_folders_that_go_are_not_told(interim: bool) -> None:
    monitor = Monitor(Alarms(AlarmConfig()), [], every=1, unit="tokens", flops_per_unit=2.0, progress=Told())
    said = summary(Path("made"), Path("log"), 1, 1.0, monitor, "tokens", {"loss": 1.0}, "penjing serve made", interim)
    assert "held out" in said
    assert [name in said for name in ("checkpoint", "made", "log", "next")] == [not interim] * 4


def test_time_in_evaluation_is_not_time_of_steps() -> None:
    import time

    kept = Kept()
    monitor = Monitor(Alarms(AlarmConfig()), [kept], every=2)
    monitor.start(0, 2)
    paused_at = monitor.pause()
    time.sleep(0.2)
    monitor.resume(paused_at)
    monitor.on_step(2, 2, values(1.0), 1, 0.0, False)
    assert kept.records[0]["step_s"] < 0.1


def test_json_lines_drop_what_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    for step in (1, 2, 3):
        sink.write({"step": step, "loss": 0.5})
    sink.close()
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    sink = JsonLines(path, first_step=2)
    sink.write({"step": 3, "loss": 0.25})
    sink.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.25},
    ]  # fmt: skip


def test_answers_with_line_separators_are_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = [{"step": step, "answer": f"one{sign}two"} for step, sign in enumerate("\u2028\u2029\x85\n\x0b")]
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in answers))
    drop_later(path, 3)
    assert [json.loads(line) for line in path.read_text().split("\n") if line] == answers[:4]


def test_values_that_json_lacks_become_null() -> None:
    kept = Kept()
    monitor = Monitor(Alarms(AlarmConfig(nonfinite="log")), [kept], every=1)
    monitor.on_step(1, 9, values(math.nan), 1, 0.0, False)
    assert kept.records[0]["loss"] is None


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    for step in (1, 2):
        sink.write({"step": step, "loss": 1.0 / step, "precision": "bf16", "eval/loss": 3.0})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/loss"}


def test_prometheus_serves_the_newest_record() -> None:
    sink = Prometheus(0)
    sink.write({"step": 3, "loss": 1.5, "precision": "bf16"})
    sink.write({"step": 4, "loss": 1.25, "eval/loss": 2.0})
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sink.close()
    assert "penjing_train_loss 1.25\n" in text
    assert "# TYPE penjing_train_eval_loss gauge" in text


def test_prometheus_reads_domains_of_any_name() -> None:
    names = ["my-notes", "wiki en.jsonl", "a/b", "a_b", 'a"\\\n', "ä"]
    shares = {f"mixing/{name}": (place + 1) / 8 for place, name in enumerate(names)}
    sink = Prometheus(0)
    sink.write({"step": 4, **shares})
    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    sink.close()
    found = {(each.name, each.labels.get("name")): each.value for family in families for each in family.samples}
    assert len(families) == len({family.name for family in families}) == 6
    assert found.pop(("penjing_train_mixing_a_b", None)) == shares["mixing/a/b"]
    assert found.pop(("penjing_train_step", None)) == 4
    assert {label: value for (_, label), value in found.items()} == {
        name: share for name, share in shares.items() if name != "mixing/a/b"
    }


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"monitor.prometheus_port = {port}: .*choose another port"):
            open_sinks(tmp_path, MonitorConfig(tensorboard=False, prometheus_port=port), 0)


class Tracker:
    """What penjing asks of wandb and of mlflow."""

    def __init__(self) -> None:
        self.runs: list[str] = []  # of each start

    def set_experiment(self, name: str) -> None: ...

    def start_run(self, run_id: str | None = None, run_name: str = "") -> SimpleNamespace:
        self.runs.append(run_id or f"{run_name} {len(self.runs)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.runs[-1]))

    def init(self, project: str, dir: str, name: str, id: str | None, resume: str) -> SimpleNamespace:
        return SimpleNamespace(id=self.start_run(id, name).info.run_id)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_that_goes_on_stays_one_run_of_a_tracker_and_a_new_one_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, tracker := Tracker())  # type: ignore[arg-type]
    config = parse_config(MonitorConfig, {"tensorboard": False, name: "all"}, "monitor")
    for first_step in (0, 20, 30, 0, 20):
        open_sinks(tmp_path / "run", config, first_step)[0].close()
    assert tracker.runs == ["run 0", "run 0", "run 0", "run 3", "run 3"]


def test_a_loss_spike_rings_and_can_stop() -> None:
    def run(action: str) -> Kept:
        kept = Kept()
        monitor = Monitor(Alarms(AlarmConfig(loss_spike=action)), [kept], every=100)  # type: ignore[arg-type]
        for step in range(2, 60):
            monitor.on_step(step, 1000, values(2.0 + 0.01 * (step % 3)), 1, 0.0, False)
        monitor.on_step(60, 1000, values(5.0), 1, 0.0, False)
        return kept

    alarm = run("log").records[-1]
    assert (alarm["step"], alarm["alarm"]) == (60, "loss_spike")
    assert run("off").records == []
    with pytest.raises(AlarmError, match=r"loss_spike at step 60: the loss 5.0000 is above"):
        run("stop")


def test_slow_alarms_need_patience() -> None:
    alarms = Alarms(AlarmConfig(patience=3, memory="stop"))
    full, idle = {"memory_share": 0.9, "gpu_use": 0.5, "io_wait": 0.0}, {"memory_share": 0.2, "gpu_use": 0.9}
    assert [len(alarms.on_record(record)) for record in (full, full, idle, full, full, full, full)] == [
        0,
        0,
        0,
        0,
        0,
        2,
        0,
    ]
    rung = Alarms(AlarmConfig(patience=1)).on_record({"io_wait": 0.2})
    assert [(alarm.name, alarm.action, alarm.message) for alarm in rung] == [
        ("io_wait", "log", "io_wait is 20%, above 5% for 1 records")
    ]


def test_alarms_remember_across_a_checkpoint() -> None:
    alarms = Alarms(AlarmConfig())
    for step in range(30):
        alarms.on_step(1.0 + 0.01 * (step % 2), False)
    other = Alarms(AlarmConfig())
    other.load_state_dict(alarms.state_dict())
    assert [alarm.name for alarm in other.on_step(2.0, False)] == ["loss_spike"]


def test_records_in_a_row_are_counted_across_a_checkpoint() -> None:
    alarms, waiting = Alarms(AlarmConfig(patience=3)), {"io_wait": 0.2}
    assert [alarms.on_record(waiting) for _ in range(2)] == [[], []]
    other = Alarms(AlarmConfig(patience=3))
    other.load_state_dict(alarms.state_dict())
    assert [alarm.name for alarm in other.on_record(waiting)] == ["io_wait"]
    assert other.on_record(waiting) == []
    older = alarms.state_dict()
    del older["in_a_row"]  # a state of before it was kept
    Alarms(AlarmConfig()).load_state_dict(older)


def test_activation_ranges_are_those_of_the_blocks() -> None:
    model = Decoder(tiny_config())
    outputs: list[torch.Tensor] = []
    handle = model.model.layers[1].register_forward_hook(lambda *seen: outputs.append(seen[2]))
    with ActivationRanges(model) as ranges:
        model(torch.arange(6).view(1, 6))
    handle.remove()
    assert ranges.values["activation/model.layers.1/amax"] == pytest.approx(outputs[0].abs().max().item())
    assert ranges.values["activation/model.layers.1/rms"] == pytest.approx(outputs[0].square().mean().sqrt().item())
    model(torch.arange(6).view(1, 6))
    assert len(ranges.values) == 4


def test_flops_are_those_of_the_formula() -> None:
    config = tiny_config()
    model, batch = Decoder(config), token_batch(2, 16, 0)
    linear = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2)  # tied: the head is the embedding
    attention = config.num_hidden_layers * 2 * 2 * 16 * config.num_attention_heads * config.head_dim
    assert forward_flops(model, CrossEntropy(), batch) == 32 * (2 * linear + attention)
    assert model.training


def test_counting_flops_leaves_statistics_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    before = [buffer.clone() for buffer in model.buffers()]
    batch = {"images": torch.randn(2, 1, 4, 4), "targets": torch.tensor([0, 1])}
    assert forward_flops(model, CrossEntropy("images"), batch) == 2 * 2 * (4 * 9 * 2 + 8 * 3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    peak, origin = peak_flops(torch.device("cpu"), torch.float32)
    assert peak > 1e9
    assert "measured here in float32" in origin


FILLS = """
    import sys
    from contextlib import closing
    from pathlib import Path
    from penjing.core.errors import SetupError
    from penjing.train.monitor.sinks import JsonLines, TensorBoard

    for sink in (JsonLines, TensorBoard):
        folder = Path(sys.argv[1]) / sink.__name__
        folder.mkdir()
        try:
            with closing(sink(folder / "x")) as open_sink:
                for step in range(3000):
                    open_sink.write({"step": step, "loss": 1.0, "learning_rate": 1.0, "gradient_norm": 1.0})
        except SetupError as error:
            print(error)
        for path in folder.rglob("*"):
            path.unlink() if path.is_file() else None
"""


def test_a_full_disk_is_one_error_of_each_sink(tmp_path: Path) -> None:
    assert run_in("tiny disk", 1 << 16, tmp_path, FILLS, forked=True) == [
        f"cannot write {tmp_path}/{name}/x: the disk is full; free some space and run again"
        for name in ("JsonLines", "TensorBoard")
    ]


def test_attention_of_shared_heads_is_counted_for_each_query() -> None:
    q, shared = torch.Size((1, 4, 8, 16)), torch.Size((1, 2, 8, 16))
    assert _cpu_attention_flops(q, shared, shared) == _cpu_attention_flops(q, q, q) == 2 * 2 * 4 * 8 * 8 * 16


def test_no_update_reaches_more_than_the_peak() -> None:
    kept, told = Kept(), Notes()
    monitor = Monitor(
        Alarms(AlarmConfig()), [kept], every=1, unit="tokens", flops_per_unit=2.0, peak_flops=1.0, progress=told
    )
    for step in (1, 2, 3):
        monitor._since = time.perf_counter() - step  # each takes a second longer
        monitor.on_step(step, 3, values(1.0), 10, 0.0, False)
    assert [round(record["mfu"], 2) for record in kept.records] == [1.0, 0.5, 0.33]
    (note,) = told.notes
    assert "6000% of the peak that was timed when the run began" in note
    assert monitor.mfu(monitor.count / monitor.seconds) == pytest.approx(0.5, abs=0.01)
