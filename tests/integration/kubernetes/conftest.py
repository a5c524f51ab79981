"""Rendered pods on a real Docker engine. Skipped where there is none.

Images stay afterwards (the next run builds on them); containers, networks, volumes and shared memory go.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.compose.conftest import (  # noqa: F401 -- fixtures
    BUILD_LIMIT_S,
    _docker_engine,
    compose,
    samples,
)
from tests.integration.compose.project import ROOT, Compose
from tests.integration.kubernetes.node import Node, docker
from tests.support.fabric.authority import Authority
from tests.support.kubernetes.manifests import Manifest, overlay, pod_templates, render_layout


@pytest.fixture(scope="session")
def images(compose: Compose) -> None:  # noqa: F811
    """Images with the names and tags of the manifests, built as the guide says."""
    compose.run("build", limit_s=BUILD_LIMIT_S)
    recipe = ROOT / "deploy" / "docker" / "Dockerfile"
    docker(
        "build", "--quiet", "--file", str(recipe), "--target", "demo_model",
        "--tag", "triptych-demo_model", str(ROOT), limit_s=BUILD_LIMIT_S,
    )  # fmt: skip
    for image in {each["image"] for pod in pod_templates(overlay("cpu")) for each in pod.containers}:
        if image.startswith("triptych-"):
            docker("tag", image.partition(":")[0], image)


@pytest.fixture(scope="module")
def node(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with all pods of overlay `cpu` ready."""
    with running_node("cpu", overlay("cpu"), tmp_path_factory.mktemp("node"), {}) as node:
        yield node


@pytest.fixture(scope="module")
def agents_node(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node with Redis, the store and a fabric agent, of a layout with neither GPUs nor engines."""
    folder = tmp_path_factory.mktemp("agents")
    manifests = render_layout(folder, ["base"], ["redis", "fabric"])
    kept = [each for each in manifests if each["kind"] != "Deployment"]
    made = Authority(folder, "fabric").environment("agents")
    tls = {
        key: Path(made[f"TRIPTYCH_FABRIC_TLS_{name}_FILE"]).read_text()
        for key, name in (("tls.crt", "CERT"), ("tls.key", "KEY"), ("ca.crt", "CA"))
    }
    with running_node("agents", kept, folder, {"fabric-tls": tls}) as node:
        yield node


@contextlib.contextmanager
def running_node(
    name: str, manifests: list[Manifest], folder: Path, given: dict[str, dict[str, str]]
) -> Iterator[Node]:
    """A node with all pods ready; taken down at the end, whatever happened."""
    password = secrets.token_hex(16)
    redis = {"REDIS_PASSWORD": password, "TRIPTYCH_REDIS_URL": f"redis://:{password}@redis:6379/0"}
    node = Node(manifests, folder, {"redis": redis} | given, f"triptych-test-{os.getpid()}-{name}")
    try:
        node.start()
        yield node
    finally:
        node.close()
