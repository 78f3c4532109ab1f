"""The run of a recipe's steps with fakes in place of the work: guard, repeats, what is kept, faults anywhere."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.compress.guard import Verdict, advice
from penjing.compress.plan import plan, stretches
from penjing.compress.run import run_recipe
from penjing.compress.steps.base import Step
from penjing.compress.steps.prune import Prune
from penjing.compress.steps.quantize import quantize_for
from penjing.compress.steps.train import Distill
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.manifest import read_manifest, verify
from penjing.core.work import WorkFolder
from tests.compress.conftest import Notes
from tests.compress.fakes import Faults, install, tiny_classifier


class Bench:
    """A folder with a model; runs recipes in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_classifier(folder / "model")
        self.notes = Notes()

    def run(
        self, steps: str, *overrides: str, at: int = 0, what: BaseException | None = None, **options: Any
    ) -> list[str]:
        """The operations that were done."""
        path = self.folder / "recipe.toml"
        guard = "[guard]\naccuracy_points = 2.0\n"
        path.write_text(
            f'model = "{self.model}"\noutput = "{self.folder / "out"}"\n{guard}[evaluate]\nresamples = 100\n{steps}'
        )
        faults = Faults(at, what or KeyboardInterrupt())
        with pytest.MonkeyPatch.context() as patch:
            install(patch, faults)
            try:
                run_recipe(path, list(overrides), progress=self.notes, **options)
            finally:
                self.operations = faults.operations
        return faults.operations

    def report(self) -> dict[str, Any]:
        verify(self.folder / "out")
        return json.loads((self.folder / "out" / "report.json").read_text())

    def stages(self) -> list[tuple[str, float]]:
        return [(stage["name"], round(stage["quality"]["value"], 3)) for stage in self.report()["stages"]]

    def decisions(self) -> list[tuple[Any, ...]]:
        return [(each["steps"][-1], each["attempt"], each["outcome"]) for each in self.report()["decisions"]]

    def work(self) -> list[str]:
        folder = self.folder / ".out.work"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def prune(ratio: float, more: str = "") -> str:
    return f'[[steps]]\nkind = "prune"\nratio = {ratio}\n{more}'


def heal(kind: str = "distill", more: str = "") -> str:
    return f'[[steps]]\nkind = "{kind}"\nsteps = 3\n{more}'


def test_the_guard_waits_for_the_healing_step(bench: Bench) -> None:
    bench.run(prune(0.2) + heal())
    # 8 points are lost after the prune, which alone would break the budget of 2; exactly 2 after the distill
    assert bench.stages() == [("00-model", 0.9), ("01-prune", 0.82), ("02-distill", 0.88)]
    assert bench.decisions() == [("02-distill", 1, "kept")]
    assert read_manifest(bench.folder / "out").created_by["command"].startswith("penjing compress ")
    assert read_manifest(bench.folder / "out").extra["from"] == "fakes"  # what the last step noted stays
    assert not list(bench.folder.glob(".*"))
    records = sorted(path.name for path in (bench.folder / "out/steps").iterdir())
    assert records == ["01-prune.json", "02-distill.json"]


def test_a_stretch_that_loses_too_much_is_repeated_milder_from_where_it_began(bench: Bench) -> None:
    bench.run(prune(0.1) + heal() + prune(0.4) + heal())
    # the budget is against the model: 0.1 then 0.4 removed loses 4.6, then 0.2: 2.8, then 0.1: 1.9
    report = bench.report()
    assert bench.decisions() == [
        ("02-distill", 1, "kept"),
        ("04-distill", 1, "repeated milder"),
        ("04-distill", 2, "repeated milder"),
        ("04-distill", 3, "kept"),
    ]
    assert [each["prunes"] for each in report["decisions"][1:]] == [
        {"03-prune": {"ratio": 0.4}}, {"03-prune": {"ratio": 0.2}}, {"03-prune": {"ratio": 0.1}},
    ]  # fmt: skip
    assert [each["prunes_next"] for each in report["decisions"][1:]] == [
        {"03-prune": {"ratio": 0.2}}, {"03-prune": {"ratio": 0.1}}, None,
    ]  # fmt: skip
    first = report["decisions"][1]
    assert first["loss"] == pytest.approx(4.6, abs=0.06)
    assert (first["reference"], first["budget"]) == (0.9, 2.0)
    assert first["loss_low"] < first["loss"] < first["loss_high"]
    assert report["stages"][-1]["record"]["state"]["removed"] == pytest.approx(0.19)
    assert any("attempt 1: 4.6 accuracy points lost" in line and "0.4" in line for line in bench.notes.lines)


def test_against_the_result_before_each_stretch_may_lose_anew(bench: Bench) -> None:
    bench.run(prune(0.15) + heal() + prune(0.15) + heal(), "guard.against=previous")
    assert [each[2] for each in bench.decisions()] == ["kept", "kept"]
    shutil.rmtree(bench.folder / "out")
    bench.run(prune(0.15) + heal() + prune(0.15) + heal())
    assert [each[2] for each in bench.decisions()] == ["kept", "repeated milder", "repeated milder", "kept"]


def test_what_cannot_be_kept_stops_the_run_with_its_numbers(bench: Bench) -> None:
    with pytest.raises(
        InputError,
        match=r"01-prune loses too much: 8 accuracy points lost \(95 %: .*\), budget 2; attempts: 2; nothing",
    ):
        bench.run(prune(0.4), "guard.retries=1")
    assert not (bench.folder / "out").exists()
    logged = [json.loads(line) for line in (bench.folder / ".out.work/decisions.jsonl").read_text().splitlines()]
    assert [each["outcome"] for each in logged] == ["repeated milder", "stopped"]
    # with a larger budget nothing is done again
    assert bench.run(prune(0.4), "guard.retries=1", "guard.accuracy_points=20") == ["measure", "report"]
    assert bench.stages()[-1] == ("01-prune", 0.74)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([Prune(ratio=0.4)], "raise the budget in [guard], prune less"),
        ([Prune(ratio=0.4), Distill(steps=3)], "raise the budget in [guard], prune less, train longer"),
        (
            [quantize_for("decoder")()],
            "raise the budget in [guard], name layers in quantize's keep",
        ),
    ],
)
def test_the_advice_fits_the_steps(steps: list[Step], says: str) -> None:
    (stretch,) = stretches(plan(tuple(steps)))
    assert advice(stretch) == says


def test_what_cannot_be_kept_is_left_out_if_the_recipe_says_so(bench: Bench) -> None:
    bench.run(prune(0.1) + heal() + prune(0.9) + heal() + prune(0.05) + heal(), "guard.otherwise=skip")
    assert [name for name, _ in bench.stages()] == ["00-model", "01-prune", "02-distill", "05-prune", "06-distill"]
    assert bench.decisions()[-2:] == [("04-distill", 3, "left out"), ("06-distill", 1, "kept")]


def test_if_all_is_left_out_the_model_itself_is_published(bench: Bench) -> None:
    bench.run(prune(0.9), "guard.otherwise=skip", "guard.retries=0")
    assert bench.stages() == [("00-model", 0.9)]
    weights = [folder / "model.safetensors" for folder in (bench.model, bench.folder / "out")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert weights[0].stat().st_ino != weights[1].stat().st_ino  # the user's file is not shared


def test_rounds_heal_in_between(bench: Bench) -> None:
    bench.run(prune(0.19, "rounds = 2\n") + heal())
    assert [name for name, _ in bench.stages()][1:] == ["01-prune", "02-distill", "03-prune", "04-distill"]
    assert bench.report()["stages"][-1]["record"]["state"]["removed"] == pytest.approx(0.19)
    assert bench.report()["stages"][1]["record"]["state"]["removed"] == pytest.approx(0.1)


def test_a_prune_that_cannot_be_milder_ends_the_repeats(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="attempts: 1"):
        bench.run(prune(0.4), "guard.floor=0.4")
    with pytest.raises(InputError, match=r"attempts: 1"):  # as where widths are rounded: nothing would leave
        bench.run(prune(0.5), at=4, what=ConfigError("nothing leaves"))
    assert any(line == "no milder prune is possible: nothing leaves" for line in bench.notes.lines)


def test_later_steps_change_without_the_earlier_ones(bench: Bench) -> None:
    first = prune(0.1) + heal()
    with pytest.raises(KeyboardInterrupt):
        bench.run(first + prune(0.05) + heal(), at=9)
    kept = {name for name in bench.work() if name.startswith(("01-", "02-"))}
    assert len(kept) == 6  # two folders, two records, two qualities
    old = {name for name in bench.work() if name.startswith("03-")}
    assert bench.run(first + prune(0.08) + heal(), at=0)[:2] == ["prune", "evaluate"]
    assert [name for name, _ in bench.stages()] == ["00-model", "01-prune", "02-distill", "03-prune", "04-distill"]
    assert old


def test_checkpoints_that_a_changed_recipe_no_longer_makes_are_deleted(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(prune(0.1) + heal(), at=4)
    old = {name for name in bench.work() if name.startswith("01-prune") and "quality" not in name}
    with pytest.raises(KeyboardInterrupt):
        bench.run(prune(0.12) + heal(), at=3)
    assert not old & set(bench.work())


def test_another_model_keeps_nothing(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.run(prune(0.1) + heal(), at=4)
    manifest = bench.model / "penjing.json"
    manifest.write_text(manifest.read_text())
    config = bench.model / "config.json"
    shutil.rmtree(bench.model)
    tiny_classifier(bench.model, side=16)
    assert config.exists()
    assert bench.run(prune(0.1) + heal())[0] == "evaluate"


def test_a_second_run_keeps_what_is_there_and_another_recipe_needs_force(bench: Bench) -> None:
    bench.run(prune(0.05))
    assert bench.run(prune(0.05)) == []
    assert "is already done: kept" in bench.notes.lines[-1]
    with pytest.raises(InputError, match="was made from another recipe, input or version; replace it with --force"):
        bench.run(prune(0.04))
    bench.run(prune(0.04), force=True)
    assert bench.stages()[-1][1] == pytest.approx(0.9 - 0.04 * 0.4, abs=1e-3)


def test_the_recipe_that_is_published_makes_it_again(bench: Bench) -> None:
    bench.run(prune(0.1, "rounds = 2\n") + heal())
    first, again = bench.report(), bench.folder / "again"
    with pytest.MonkeyPatch.context() as patch:
        install(patch, Faults())
        run_recipe(bench.folder / "out/recipe.toml", out=again)
    second = json.loads((again / "report.json").read_text())
    assert second["decisions"] == first["decisions"]
    assert [each["quality"] for each in second["stages"]] == [each["quality"] for each in first["stages"]]


def test_a_full_disk_is_one_clear_error_and_the_run_goes_on_later(bench: Bench) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(SetupError, match=r"cannot write .*the disk is full; free some space and run again"):
        bench.run(prune(0.1) + heal(), at=4, what=full)
    assert not (bench.folder / "out").exists()
    assert bench.run(prune(0.1) + heal()) == ["distill", "evaluate", "measure", "report"]


def test_too_little_disk_and_memory_are_refused_before_work_starts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 10))  # pyright: ignore
        with pytest.raises(SetupError, match=r"has 0.01 kB free, the steps need .*; free some space"):
            bench.run(prune(0.1) + heal())
    monkeypatch.setattr("penjing.compress.preflight.available_bytes", lambda: 1000)
    with pytest.raises(SetupError, match="of memory are available, the steps need about"):
        bench.run(prune(0.1) + heal())
    assert bench.operations == []


def test_preflight_says_what_is_checked_and_written_where(bench: Bench) -> None:
    bench.run(prune(0.1) + heal())
    said = "\n".join(bench.notes.lines[:3])
    for text in ("01-prune, 02-distill", str(bench.folder / "out"), ".out.work", "guard after 02-distill", "memory"):
        assert text in said
    assert "GFLOP/s that a matrix product reached" in said
    out = bench.folder / "out"
    assert f"wrote {out}; {out}/report.html says what each step gained and cost" in bench.notes.lines


def test_two_runs_on_one_output_do_not_meet(bench: Bench) -> None:
    with WorkFolder(bench.folder / "out", "key"), pytest.raises(SetupError, match="another process is working in"):
        bench.run(prune(0.1))


STEPS = st.lists(
    st.one_of(
        st.floats(0.02, 0.9).map(lambda ratio: prune(round(ratio, 2))),
        st.integers(2, 3).map(lambda rounds: prune(0.2, f"rounds = {rounds}\n")),
        st.just(heal("distill")),
        st.just(heal("finetune", "guard = false\n")),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=8, deadline=None)
@given(steps=STEPS, skip=st.booleans(), stops=st.lists(st.integers(1, 6), max_size=6))
def test_a_run_that_is_stopped_anywhere_ends_as_one_that_is_not(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], skip: bool, stops: list[int]
) -> None:
    """Each stop costs the one operation that it struck, and what comes of it (an error too) is the same."""
    text = "".join([prune(0.05), *steps])
    guard = f"guard.otherwise={'skip' if skip else 'stop'}"
    whole, parts = (Bench(tmp_path_factory.mktemp("run")) for _ in range(2))
    outcomes = []
    for bench, at in ((whole, []), (parts, stops)):
        done = 0
        result = None
        for stop in [*at, 0]:
            try:
                bench.run(text, guard, at=stop)
            except KeyboardInterrupt:
                assert not (bench.folder / "out").exists()
                assert not list(bench.folder.rglob("*.partial-*"))
                done += len(bench.operations) - 1
                continue
            except InputError as error:  # the guard stopped the run
                log = (bench.folder / ".out.work/decisions.jsonl").read_text()
                result = (str(error).replace(str(bench.folder), ""), log)
            else:
                report = bench.report()
                stages = [(each["name"], each["quality"], each["record"]) for each in report["stages"]]
                result = (stages, report["decisions"])
            done += len(bench.operations)
            break
        outcomes.append((result, done))
    assert outcomes[0] == outcomes[1]


def test_a_small_rise_of_perplexity_can_be_read() -> None:
    verdict = Verdict(1.00214, 1.00082, 1.00347, 1.01, "times the perplexity")
    assert str(verdict) == "1.0021 times the perplexity (95 %: 1.0008 … 1.0035), budget 1.01"


def test_what_got_better_is_a_gain() -> None:
    verdict = Verdict(-4.6875, -9.375, 0.5, 1.0, "agreement points lost")
    assert str(verdict) == "4.6875 agreement points gained (95 %: -0.5 … 9.375), budget 1"
    assert str(Verdict(0.98, 0.97, 0.99, 1.01, "times the perplexity")).startswith("0.98 times the perplexity (")
