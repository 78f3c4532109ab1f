"""Dashboard and alerts: they ask for figures that a server has, and Prometheus itself takes and answers them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from penjing.serve.access.keys import add_key
from penjing.serve.front import figures
from penjing.serve.gate import usage
from penjing.serve.triton import batch_metrics, metrics
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import free_ports, serving, wait_until

OBSERVE = Path(__file__).parents[2] / "docker" / "observe"
DASHBOARD = json.loads((OBSERVE / "grafana" / "penjing.json").read_text())
ALERTS = yaml.safe_load((OBSERVE / "alerts.yaml").read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
SCRAPE_SECONDS = 60
OF_BATCHES = "batch_"
"""A decoder has no figures whose names hold this."""


def needs(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed (apt-get install prometheus)")
    return found


def test_panels_and_alerts_ask_for_figures_that_there_are() -> None:
    histograms = {*metrics.HISTOGRAMS, *batch_metrics.HISTOGRAMS, *(f"front_{name}" for name in usage.HISTOGRAMS)}
    of_front = {f"front_{usage.RUNNING}", *(f"front_{name}_total" for name in usage.COUNTERS)}
    known = {
        figures.UP.removeprefix("penjing:"),
        *metrics.GAUGES,
        *metrics.COUNTERS,
        metrics.FINISHED,
        metrics.REFUSED,
        *of_front,
    }
    known |= {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    texts = [*QUERIES, *(rule["expr"] for rule in ALERTS)]
    asked = {name for text in texts for name in re.findall(r"penjing:(\w+)", text)}
    assert asked <= known
    assert {name for text in QUERIES for name in re.findall(r"penjing:(\w+)", text)} >= {
        *metrics.GAUGES, *metrics.COUNTERS, metrics.FINISHED, metrics.REFUSED, *of_front,
    }  # fmt: skip
    labels = {value for text in texts for value in re.findall(r'reason="(\w+)"', text)}
    assert labels <= {*metrics.REASONS, *metrics.FINISH_REASONS, "invalid_api_key"}


def test_the_dashboard_fits_together() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in DASHBOARD["panels"]]
    assert len({(x, y) for x, y, _, _ in places}) == len(places)
    assert all(x + w <= 24 for x, _, w, _ in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(DASHBOARD["panels"]))) - {"__rate_interval"}
    assert used == variables
    scraped = yaml.safe_load((OBSERVE / "prometheus.yaml").read_text())["scrape_configs"]
    assert [each["job_name"] for each in scraped] == ["penjing"]


def test_promtool_takes_the_files_and_the_alerts_fire_when_they_should() -> None:
    promtool = needs("promtool")
    for arguments in (
        ["check", "config", "prometheus.yaml"],
        ["check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml"],
        ["test", "rules", "alerts_test.yaml"],
    ):
        done = subprocess.run([promtool, *arguments], cwd=OBSERVE, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.server
@pytest.mark.xdist_group("triton")
def test_every_panel_shows_data_of_a_real_server(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    binary = needs("prometheus")
    (port,) = free_ports(1)
    keys = tmp_path / "keys.toml"
    secret = add_key(keys, "prometheus", {"metrics": True})
    with serving(make_tiny_checkpoint(max_position_embeddings=4096), front={"keys": str(keys)}) as served:
        front = Fronted(served)
        config = yaml.safe_load((OBSERVE / "prometheus.yaml").read_text())
        config["global"]["scrape_interval"] = "500ms"
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{front.port}"]
        config["scrape_configs"][0]["authorization"] = {"credentials": secret}
        config["rule_files"] = [str(OBSERVE / "alerts.yaml")]
        (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
        command = [binary, f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
        with (
            open(tmp_path / "log", "wb") as log,
            subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            ) as prometheus,
        ):
            try:
                bearer = {"authorization": f"Bearer {secret}"}
                body: dict[str, Any] = {"model": "llm", "prompt": "a bonsai of words", "max_tokens": 20}
                forms: list[dict[str, Any]] = [{"ignore_eos": True, "stream": True}, {"guided_regex": "[a-z]+"}]
                deadline = time.monotonic() + SCRAPE_SECONDS
                missing = [query for query in QUERIES if OF_BATCHES not in query]
                assert len(missing) > 30
                while missing and time.monotonic() < deadline:
                    for form in forms:
                        assert front.ask("/v1/completions", body | form, headers=bearer).status == 200
                    assert front.ask("/v1/completions", body | {"model": "other"}, headers=bearer).status == 404
                    missing = [query for query in missing if not asked(port, query)]
                    time.sleep(0.3)
                assert not missing, (tmp_path / "log").read_text()
                assert asked(port, 'up{job="penjing"} == 1')
                wait_until(lambda: not asked(port, 'ALERTS{alertstate="firing"}'), 1, "no alert")
            finally:
                prometheus.terminate()


def asked(port: int, query: str) -> list[Any]:
    """Series that Prometheus answers with; one whose value is NaN counts as none."""
    query = query.replace("$__rate_interval", "30s").replace("$instance", ".*")
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            found = json.load(answer)["data"]["result"]
    except OSError:
        return []
    return [series for series in found if series["value"][1] != "NaN"]
