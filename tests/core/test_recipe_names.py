"""Keys that no recipe of a stage has are told before the settings are imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penjing.compress.old_grammar import OLDER
from penjing.core import cli, cli_options, family
from penjing.core.errors import ConfigError, InputError
from penjing.core.recipe_keys import names_file
from penjing.core.recipes import StageName, check_keys, named_recipe, recipe_names, stage_of

ROOT = Path(__file__).parents[2]


def test_the_list_of_names_is_current() -> None:
    """`make recipes-doc` writes it anew."""
    assert (ROOT / "core/recipe_names.json").read_text() == names_file()


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_that_come_along_have_known_keys(name: str) -> None:
    values = tomllib.loads(named_recipe(name))
    check_keys(values, name, stage_of(values, name))


@pytest.mark.parametrize(
    ("stage", "text", "said"),
    [
        ("compress", "modle = 1", r"r: unknown key 'modle'; did you mean 'model'\? Valid keys: data, evaluate,"),
        ("compress", "[data]\nimagess = 1", r"unknown key 'data.imagess'; did you mean 'images'\?"),
        ("compress", "steps = [{kind = 'window'}, {kind = 'prune', ratioo = 1}]", "unknown key 'steps.1.ratioo'"),
        ("compress", "steps = [{kind = 'quantize', zzz = 1}]", "unknown key 'steps.0.zzz'. Valid keys: activations,"),
        ("compress", "[[steps]]\nkind = 'distill'\noptimizer.nam = 1", "unknown key 'steps.0.optimizer.nam'"),
        ("train", "data = {kind = 'fashion-mnist', column = 3}", "unknown key 'data.column'"),
        ("train", "model = {architecture = 'decoder', moe = {expert = 3}}", "unknown key 'model.moe.expert'"),
        ("search", "spac = 1", r"did you mean 'space'\?"),
        ("curate", "steps = [{kind = 'pii', key = 'a'}]", "unknown key 'steps.0.key'"),
    ],
)
def test_unknown_keys_are_told_with_their_place(stage: StageName, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_keys(tomllib.loads(text), "r", stage)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        ("search", "[space]\n'optimizer.lr' = {low = 1, high = 2}\nseed = {values = [1]}"),
        ("compress", "steps = [{kind = 'nothing', zzz = 1}, 3]\ndata = 3"),  # told by the settings themselves
        ("compress", "[quantize]\nbits = 8\n[[steps]]\nkind = 'prune'\nint8 = {}"),  # told in today's spelling
        ("compress", "steps = [{kind = 'quantize', observer = 'mse', transform = {rotate = true}}]"),
        ("train", "data = {column = 3}\nmodel = 'a'"),
        ("train", "data = {kind = 'samples', images = 'photos/'}"),  # another spelling of source
        ("train", "data = {kind = 'rollouts', top_p = 0.9}"),  # refused with a reason of its own
        ("compress", "[data]\nimages = 'photos/'\n[evaluate]\nimages = 'photos/'"),
    ],
)
def test_what_a_recipe_may_hold_or_is_told_later_passes(stage: StageName, text: str) -> None:
    check_keys(tomllib.loads(text), "r", stage, OLDER)


def test_keys_of_families_from_elsewhere_are_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [Path("graph-int8"), ["steps.2.mine=1"], "compress"]
    with pytest.raises(ConfigError, match=r"unknown key 'steps\.2\.mine'"):
        cli_options.refuse_early(*wrong)  # type: ignore[arg-type]
    monkeypatch.setattr(family, "_packages", lambda: {"mine": "my_package"})
    with pytest.raises(InputError, match=r"build/net does not exist"):
        cli_options.refuse_early(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["evaluate", "smollm2-grpo", "--model", "build/a"], "penjing.train.align.evaluate"),
        (["simulate", "decoder-1b", "--stages", "2"], "penjing.train.plan.simulation"),
        (["plan", "decoder-1b", "--gpus", "8", "--memory", "80GiB"], "penjing.train.plan.planner"),
    ],
)
def test_commands_beside_training_tell_it_before_their_imports(
    command: list[str], module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # an import of it raises
    assert cli._run(["train", *command, "--set", "stepps=3"]) == 2
    assert "unknown key 'stepps'; did you mean 'steps'?" in capsys.readouterr().err


def test_no_torch_is_imported_before_an_unknown_key_is_told() -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom penjing.core.cli_options import refuse_early\n"
        "from penjing.core.errors import ConfigError\ntry:\n"
        "    refuse_early(Path('graph-int8'), ['data.imagess=a'], 'compress')\nexcept ConfigError as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.startswith("graph-int8: unknown key 'data.imagess'; did you mean 'images'?"), result.stderr
    assert result.stdout.endswith("False\n")
