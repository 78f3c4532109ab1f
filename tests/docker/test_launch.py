"""The files that start training on a cluster: their structure, and what they hand to torchrun."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).parents[2]
KUBERNETES, SLURM = ROOT / "docker" / "kubernetes", ROOT / "docker" / "slurm" / "train.sh"


def parsed(arguments: list[str]):
    """The arguments as torchrun itself reads them."""
    return get_args_parser().parse_args(arguments)


def test_the_indexed_job_finds_its_first_pod():
    service, job = yaml.safe_load_all((KUBERNETES / "train-job.yaml").read_text())
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(environment["NNODES"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] == "Never"  # as podFailurePolicy demands
    arguments = parsed([argument.replace("$(NNODES)", environment["NNODES"]) for argument in container["args"]])
    port = service["spec"]["ports"][0]["port"]
    assert arguments.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:{port}"
    assert (arguments.nnodes, arguments.rdzv_backend, arguments.module) == ("4", "c10d", True)
    assert int(arguments.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert arguments.training_script == "penjing.train"
    assert arguments.training_script_args == ["/data/decoder-1b.toml", "--resume=auto"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_train_job_uses_the_runtime_of_kubeflow():
    job = yaml.safe_load((KUBERNETES / "train-kubeflow.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec = job["spec"]
    # the fields of TrainJobSpec and Trainer in kubeflow/trainer's v1alpha1 types that are used here
    assert spec.keys() == {"runtimeRef", "trainer", "runtimePatches"}
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    trainer = spec["trainer"]
    assert trainer.keys() == {"image", "command", "args", "numNodes", "numProcPerNode", "resourcesPerNode", "env"}
    arguments = parsed(trainer["args"])
    assert (arguments.module, arguments.training_script) == (True, "penjing.train")
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    (patch,) = spec["runtimePatches"]
    assert "/" in patch["manager"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def run_slurm(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script with stand-ins for Slurm's commands: `srun` prints what it is given."""
    for tool, body in {"scontrol": "printf 'node7\\nnode8\\n'", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / tool).chmod(0o755)
    path = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(SLURM), *arguments], env=path | environment, capture_output=True, text=True, check=False
    )


def test_the_slurm_script_starts_torchrun_on_every_node(tmp_path):
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    done = run_slurm(tmp_path, "recipe.toml", "--profile", **job)
    assert done.returncode == 0, done.stderr
    given = done.stdout.splitlines()
    start = given.index("torch.distributed.run")
    assert given[start - 2 : start] == ["python3", "-m"]
    arguments = parsed(given[start + 1 :])
    assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "4")
    host, port = arguments.rdzv_endpoint.split(":")
    assert host == "node7"
    assert 1024 < int(port) < 65536
    assert arguments.training_script == "penjing.train"
    assert arguments.training_script_args == ["recipe.toml", "--profile", "--resume", "auto"]


@pytest.mark.parametrize(
    ("arguments", "message"), [((), "usage: sbatch"), (("recipe.toml",), "no Slurm job; start it with sbatch")]
)
def test_the_slurm_script_says_how_it_is_started(tmp_path, arguments, message):
    done = run_slurm(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_slurm_script_is_sound():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    assert "set -euo pipefail" in SLURM.read_text()
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SLURM)], check=True)


def test_the_guide_names_every_file_and_port():
    guide = (ROOT / "docs" / "parallel.md").read_text()
    for name in (
        "docker/kubernetes/train-job.yaml",
        "docker/kubernetes/train-kubeflow.yaml",
        "docker/slurm/train.sh",
        "29500",
    ):
        assert name in guide
