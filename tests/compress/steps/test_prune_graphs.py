"""The step `prune` on checkpoints of graphs: an ordinary checkpoint comes out, and what was not done is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penjing.compress.families.base import family_at
from penjing.compress.prune.budget import latency
from penjing.compress.prune.inspect import inspect_network
from penjing.compress.prune_graph import subject
from penjing.compress.prune_graph.rewrite import Unfit
from penjing.compress.prune_graph.statistics import reestimate_graph
from penjing.compress.run import run_recipe
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.trace import from_torch
from penjing.core.progress import Silent
from tests.compress.conftest import Notes
from tests.compress.graphs import graph_folder, write_graph
from tests.compress.prune.checkpoints import Data, prune
from tests.compress.prune_graph.test_prune_graph import Distances
from tests.compress.prune_graph.traits import HeadsInTheSource, Windows, image, rows


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 24, 3, 2)
        self.last = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3)))


def test_a_pruned_folder_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    source = graph_folder(tmp_path / "dense", Normed(), image(12))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'model = "{source}"\noutput = "{tmp_path / "pruned"}"\n[measure]\nrounds = 0\n[guard]\nsimilarity_loss = 1.0\n'
        '[[steps]]\nkind = "prune"\nratio = 0.5\nguard = false\n[[steps]]\nkind = "prune"\nratio = 0.5\nround_to = 2\n'
    )
    run_recipe(recipe)
    pruned = load_network(tmp_path / "pruned")
    shapes = {name: tuple(p.shape) for name, p in pruned.module.named_parameters()}
    assert shapes["first.weight"] == (4, 3, 3, 3)
    assert shapes["second.weight"] == (8, 4, 3, 3)
    assert pruned(torch.randn(7, 3, 12, 12))[0].shape == (7, 5)


@pytest.mark.parametrize("method", ["l1", "l2", "taylor", "activation", "random"])
def test_each_score_and_each_budget(tmp_path: Path, method: str) -> None:
    source = graph_folder(tmp_path / "dense", HeadsInTheSource(), rows())
    data = Graphs((rows(), rows()))
    record = prune(source, tmp_path / "pruned", data, method=method, target={"parameters": 0.6}, round_to=1)
    assert record["parameters"]["after"] <= 0.6 * record["parameters"]["before"]
    assert record["macs"]["after"] < record["macs"]["before"]
    assert {row["before"] for row in record["groups"]} == {4}  # heads
    opened = subject.GraphSubject(source, Silent())
    assert latency(opened.dense, load_network(tmp_path / "pruned").module, (rows(),))["ratio"] > 0


class Graphs(Data):
    """Batches of a network that gives a tuple."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(*((x, x) for x in inputs))

    def losses(self, model: nn.Module) -> Any:
        for x, y in self.batches:
            yield (model(x)[0] - y).square().mean()


def test_activations_of_a_unit_that_never_speaks_go_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = graph_folder(tmp_path / "dense", nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), rows(6))
    network = load_network(source)
    with torch.no_grad():
        network.module.get_parameter("0.bias")[5] = -1e6
    quiet = write_graph(tmp_path / "quiet", network)
    record = prune(quiet, tmp_path / "pruned", Graphs((rows(6),)), method="activation", ratio=0.125, round_to=1)
    assert [row["removed"] for row in record["groups"]] == [[5]]


def test_what_stays_whole_is_said(tmp_path: Path, notes: Notes) -> None:
    source = graph_folder(tmp_path / "dense", Distances(), torch.randn(2, 5, 6))
    record = prune(source, tmp_path / "pruned", ratio=0.5, round_to=1, progress=notes)
    assert [row["name"] for row in record["groups"]] == ["up.weight[dim 0]"]
    (line,) = [line for line in notes.lines if "stays whole" in line]
    assert line.startswith("k.weight[dim 0] stays whole: without half of its units, matmul = aten.matmul.default")
    assert list(record["kept_whole"]) == ["k.weight[dim 0]"]


def test_nothing_is_written_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = graph_folder(tmp_path / "dense", HeadsInTheSource(), rows())
    node = next(iter(load_network(source).module.graph.nodes))

    def differs(*_: Any) -> None:
        raise Unfit(node, "its values differ")

    monkeypatch.setattr(subject, "check_same", differs)
    with pytest.raises(
        InputError, match=r"not what the whole one is .* first at q_weight = q.weight in .*: its values differ"
    ):
        prune(source, tmp_path / "pruned", ratio=0.5, round_to=1)
    assert not any((tmp_path / "pruned").iterdir())


def test_refusals(tmp_path: Path) -> None:
    source = graph_folder(tmp_path / "dense", Windows(), image(6))
    with pytest.raises(ConfigError, match="protect: 'nobody' matches no tensor"):
        prune(source, tmp_path / "a", ratio=0.5, protect=["nobody"])
    with pytest.raises(ConfigError, match="decoders have parts"):
        prune(source, tmp_path / "b", ratio=0.5, parts=["heads"])
    torch.manual_seed(0)
    broken = graph_folder(tmp_path / "none", nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    with pytest.raises(InputError, match="no width of it can leave; leave the prune step out"):
        prune(broken, tmp_path / "c", ratio=0.5)


def test_statistics_of_norms_are_those_of_all_samples() -> None:
    torch.manual_seed(0)
    network = from_torch(Normed().eval(), (image(12),))
    batches = [torch.randn(5, 3, 12, 12) + 1, torch.randn(3, 3, 12, 12)]
    before = {name: buffer.clone() for name, buffer in network.module.named_buffers()}
    assert reestimate_graph(network.module, ((x,) for x in batches)) == 1
    first = nn.Conv2d(3, 16, 3)
    first.load_state_dict(
        {"weight": network.module.get_parameter("first.weight"), "bias": network.module.get_parameter("first.bias")}
    )
    values = torch.cat([first(x).movedim(1, -1).flatten(0, -2) for x in batches])
    torch.testing.assert_close(network.module.get_buffer("norm.running_mean"), values.mean(0))
    torch.testing.assert_close(network.module.get_buffer("norm.running_var"), values.var(0))
    assert not torch.equal(before["norm.running_mean"], network.module.get_buffer("norm.running_mean"))
    assert reestimate_graph(from_torch(HeadsInTheSource().eval(), (rows(),)).module, ()) == 0


def test_a_graph_is_inspected_without_its_weights(tmp_path: Path) -> None:
    source = graph_folder(tmp_path / "dense", HeadsInTheSource(), rows())
    result = inspect_network(source, family_at(source).skeleton(source), Silent())
    assert [(row["units"], row["indices"]) for row in result["groups"]] == [(4, 6)]
    json.dumps(result)
