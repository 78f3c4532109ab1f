"""The manifests that serve: Kubernetes' own schemas take them, the parts fit each other, and mutants of them fail."""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from penjing.serve.cli import app
from penjing.serve.supervisor.process import ServeConfig

BASE = Path(__file__).parents[2] / "docker" / "kubernetes" / "serve" / "base"
Manifests = dict[str, Any]
SECONDS_TO_END = 15  # after the drain


def read() -> Manifests:
    """Resources by kind, as kustomize lists them."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    found = [yaml.safe_load((BASE / name).read_text()) for name in kustomization["resources"]]
    files = {path.name for path in BASE.iterdir()} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    return {each["kind"]: each for each in found}


def problems(manifests: Manifests) -> Iterator[str]:
    """What is wrong, by Kubernetes' schemas and by what must agree between the resources and with penjing."""
    for kind, manifest in manifests.items():
        try:
            kubernetes_validate.validate(manifest, "1.31", strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{kind}: {error.message}"
            return
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{kind}: {error}"
            return
    if set(manifests) != {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"}:
        yield f"kinds: {sorted(manifests)}"
        return
    deployment = manifests["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    selectors = {
        "Deployment": deployment["selector"]["matchLabels"],
        "Service": manifests["Service"]["spec"]["selector"],
        "PodDisruptionBudget": manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": manifests["NetworkPolicy"]["spec"]["podSelector"].get("matchLabels", {}),
    }
    for kind, selector in selectors.items():
        if not selector or not selector.items() <= labels.items():
            yield f"{kind}: selects other pods"
    yield from pod_problems(deployment["template"]["spec"])
    pod = deployment["template"]["spec"]["containers"][0]
    (port,) = pod["ports"]
    if manifests["Service"]["spec"]["ports"][0]["targetPort"] not in (port["name"], port["containerPort"]):
        yield "Service: another port"
    if deployment["template"]["metadata"]["annotations"]["prometheus.io/port"] != str(port["containerPort"]):
        yield "Deployment: Prometheus is sent to another port"
    scaler = manifests["HorizontalPodAutoscaler"]["spec"]
    target = scaler["scaleTargetRef"]
    if (target["kind"], target["name"]) != ("Deployment", manifests["Deployment"]["metadata"]["name"]):
        yield "HorizontalPodAutoscaler: scales something else"
    if not 2 <= scaler["minReplicas"] <= scaler["maxReplicas"]:
        yield "HorizontalPodAutoscaler: one pod cannot be drained without a gap"
    if [metric["type"] for metric in scaler["metrics"]] != ["Pods"]:
        yield "HorizontalPodAutoscaler: not by what waits"
    budget = manifests["PodDisruptionBudget"]["spec"]
    if budget.get("maxUnavailable") != 1:
        yield "PodDisruptionBudget: more than one at a time"
    policy = manifests["NetworkPolicy"]["spec"]
    if set(policy["policyTypes"]) != {"Ingress", "Egress"} or policy.get("egress"):
        yield "NetworkPolicy: pods can call out"
    for rule in policy["ingress"]:
        if not rule.get("from") or [each["port"] for each in rule.get("ports", [])] != [port["name"]]:
            yield "NetworkPolicy: more than the front is open"


def pod_problems(pod: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the pod by itself."""
    (container,) = pod["containers"]
    (port,) = container["ports"]
    arguments = container["args"]
    words = dict(itertools.pairwise(arguments))
    if words.get("--openai") != str(port["containerPort"]) or words.get("--host") != "0.0.0.0":
        yield "args: the front does not listen where the pod says"
    if unknown := [word for word in arguments if word.startswith("--") and word not in flags()]:
        yield f"args: {unknown} are no flags of penjing serve"
    probes = {name: container.get(f"{name}Probe", {}).get("httpGet") for name in ("startup", "readiness", "liveness")}
    wanted = {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    for name, path in wanted.items():
        if probes[name] is None or (probes[name]["path"], probes[name]["port"]) != (path, port["name"]):
            yield f"{name}Probe: does not ask the front"
    startup = container.get("startupProbe", {})
    if startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3) < ServeConfig().start_timeout:
        yield "startupProbe: gives up before penjing does"
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
    pause = int(command[1]) if command[0] == "sleep" else 0
    if pause < 5:
        yield "preStop: the pod drains before it is known"
    if pod["terminationGracePeriodSeconds"] < pause + ServeConfig().drain_timeout + SECONDS_TO_END:
        yield "terminationGracePeriodSeconds: running answers are cut"
    secure = container["securityContext"]
    if not secure.get("readOnlyRootFilesystem") or secure.get("allowPrivilegeEscalation") is not False:
        yield "securityContext: more than is needed"
    if secure.get("capabilities", {}).get("drop") != ["ALL"] or not pod["securityContext"].get("runAsNonRoot"):
        yield "securityContext: more than is needed"
    if pod["securityContext"].get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "securityContext: no seccomp profile"
    if pod.get("automountServiceAccountToken") is not False:
        yield "the pod gets a token that it does not need"
    if "memory" not in container["resources"].get("limits", {}):
        yield "resources: no limit of memory"
    if {mount["name"] for mount in container["volumeMounts"]} != {volume["name"] for volume in pod["volumes"]}:
        yield "volumes: mounts without a volume, or the other way round"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    if not {"/model", "/opt/penjing/cache/run", "/tmp", "/dev/shm"} <= mounted:
        yield "volumes: a place that is written is read-only"


@functools.cache
def flags() -> str:
    """The help of `penjing serve`."""
    return CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output


def test_the_manifests_are_sound() -> None:
    assert list(problems(read())) == []


def change(path: str, value: Any, manifests: Manifests) -> None:
    """Set what the path names (~ for a slash in a name); DELETE takes it away."""
    *parents, last = [int(part) if part.isdigit() else part.replace("~", "/") for part in path.split("/")]
    place: Any = manifests
    for part in parents:
        place = place[part]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value


DELETE = object()
POD = "Deployment/spec/template/spec"
CONTAINER = f"{POD}/containers/0"
MUTANTS: dict[str, Callable[[Manifests], None]] = {
    f"{path} {'is gone' if value is DELETE else value}": functools.partial(change, path, value)
    for path, value in [
        ("Deployment/spec/replica", 3),
        ("Deployment/spec/replicas", "two"),
        ("Deployment/apiVersion", "apps/v9"),
        ("Deployment/spec/template/metadata/labels", {"app.kubernetes.io/name": "bonsai"}),
        ("Deployment/spec/template/metadata/annotations/prometheus.io~port", "8002"),
        (f"{POD}/terminationGracePeriodSeconds", 30),
        (f"{POD}/automountServiceAccountToken", DELETE),
        (f"{POD}/securityContext/runAsNonRoot", False),
        (f"{POD}/securityContext/seccompProfile/type", "Unconfined"),
        (f"{POD}/volumes/3", DELETE),
        (f"{CONTAINER}/args", ["serve", "/model", "--host", "0.0.0.0"]),
        (f"{CONTAINER}/args", ["serve", "/model", "--openai", "8080", "--host", "0.0.0.0", "--no-such-flag"]),
        (f"{CONTAINER}/args/3", "8000"),
        (f"{CONTAINER}/ports/0/containerPort", 8000),
        (f"{CONTAINER}/ports/0/containerPort", "8080"),
        (f"{CONTAINER}/readinessProbe", DELETE),
        (f"{CONTAINER}/readinessProbe/httpGet", {"path": "/v2/health/ready", "port": 8000}),
        (f"{CONTAINER}/livenessProbe/httpGet", {"path": "/health/ready", "port": "http"}),
        (f"{CONTAINER}/startupProbe/failureThreshold", 10),
        (f"{CONTAINER}/lifecycle", DELETE),
        (f"{CONTAINER}/lifecycle/preStop/exec/command", ["true"]),
        (f"{CONTAINER}/lifecycle/preStop/exec/command", ["sleep", "60"]),
        (f"{CONTAINER}/resources/limits", {}),
        (f"{CONTAINER}/securityContext/readOnlyRootFilesystem", False),
        (f"{CONTAINER}/securityContext/capabilities/drop", []),
        (f"{CONTAINER}/securityContext/allowPriviledgeEscalation", False),
        (f"{CONTAINER}/volumeMounts/1", DELETE),
        ("Service/spec/selector", {"app": "penjing"}),
        ("Service/spec/ports/0/targetPort", 8001),
        ("PodDisruptionBudget/spec/selector/matchLabels", {"app.kubernetes.io/name": "other"}),
        ("PodDisruptionBudget/spec/maxUnavailable", 2),
        ("PodDisruptionBudget/kind", "PodDisruptionBudgets"),
        ("HorizontalPodAutoscaler/spec/scaleTargetRef/name", "bonsai"),
        ("HorizontalPodAutoscaler/spec/minReplicas", 1),
        ("HorizontalPodAutoscaler/spec/metrics/0/type", "Resource"),
        ("HorizontalPodAutoscaler/spec/metrics/0/pods/metric/names", "x"),
        ("NetworkPolicy/spec/podSelector", {}),
        ("NetworkPolicy/spec/policyTypes", ["Ingress"]),
        ("NetworkPolicy/spec/egress", [{}]),
        ("NetworkPolicy/spec/ingress/0/from", DELETE),
        ("NetworkPolicy/spec/ingress/0/ports", DELETE),
        ("NetworkPolicy", DELETE),
    ]
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_fails(mutant: Callable[[Manifests], None]) -> None:
    manifests = copy.deepcopy(read())
    mutant(manifests)
    assert list(problems(manifests)), "nothing is found wrong with it"


def test_kustomize_builds_what_was_checked() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", str(BASE)], capture_output=True, text=True, check=True)
    built = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert list(problems(built)) == []
    assert built["Deployment"]["spec"]["template"]["spec"]["containers"][0]["image"] == "penjing:cpu"
