"""Manifests of deploy/kubernetes as `kubectl kustomize` renders them, and the pods in them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = tuple(sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir()))
WORKLOADS = frozenset({"Deployment", "DaemonSet", "StatefulSet", "Job"})
RENDER_LIMIT_S = 120.0

Manifest = dict[str, Any]


def kubectl(*arguments: str) -> str:
    """Return stdout of the kubectl installed with the tests; this shell's settings do not count."""
    binary = Path(sys.executable).with_name("kubectl")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRIPTYCH_", "OTEL_", "VLLM_"))
    }
    done = subprocess.run(
        [str(binary), *arguments],
        env=kept,
        capture_output=True,
        text=True,
        timeout=RENDER_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}:\n{done.stderr}"
    return done.stdout


@cache
def _rendered(folder: Path) -> str:
    return kubectl("kustomize", str(folder))


def render(folder: Path) -> list[Manifest]:
    """Return the manifests of a kustomization; the caller may change them."""
    return list(yaml.load_all(_rendered(folder), yaml.CSafeLoader))


def render_layout(
    folder: Path, resources: Sequence[str], components: Sequence[str], name: str = "mine"
) -> list[Manifest]:
    """Return the manifests of an overlay of a user's own; made in a copy of deploy/ below `folder`."""
    deploy = folder / "deploy"
    if not deploy.exists():
        shutil.copytree(ROOT / "deploy", deploy)
    made = deploy / "kubernetes" / "overlays" / name
    made.mkdir()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "triptych",
        "resources": [f"../../{each}" for each in resources],
        "components": [f"../../components/{each}" for each in components],
    }
    (made / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(made)


def overlay(name: str) -> list[Manifest]:
    return render(KUBERNETES / "overlays" / name)


@dataclass(frozen=True)
class PodTemplate:
    """Pods of one workload."""

    workload: Manifest

    @property
    def kind(self) -> str:
        return cast(str, self.workload["kind"])

    @property
    def name(self) -> str:
        return cast(str, self.workload["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return cast(dict[str, str], self.workload["spec"]["template"]["metadata"]["labels"])

    @property
    def spec(self) -> Manifest:
        return cast(Manifest, self.workload["spec"]["template"]["spec"])

    @property
    def main(self) -> Manifest:
        """Container that serves; each pod has one."""
        (container,) = self.spec["containers"]
        return cast(Manifest, container)

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def pod_templates(manifests: list[Manifest]) -> list[PodTemplate]:
    return [PodTemplate(each) for each in manifests if each["kind"] in WORKLOADS]


def of_kind(manifests: list[Manifest], kind: str) -> Iterator[Manifest]:
    return (each for each in manifests if each["kind"] == kind)


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name)
    return found


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """True if a label selector selects pods with `labels`."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for each in selector.get("matchExpressions", ()):
        if each["operator"] != "In":
            raise NotImplementedError(f"operator {each['operator']} of a label selector")
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def environment(manifests: list[Manifest], container: Manifest) -> dict[str, str]:
    """Return the variables that ConfigMaps and plain values give a container; the later one wins."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= named(manifests, "ConfigMap", source["configMapRef"]["name"])["data"]
    return found | {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
