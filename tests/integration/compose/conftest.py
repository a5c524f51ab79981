"""The system of compose.yaml, or of several hosts, on a real Docker engine. Skipped where there is none.

Images stay afterwards (the next run builds on them); containers, networks and volumes go.

    TRIPTYCH_MODEL    another model folder
    TRIPTYCH_WHEELS   an image with wheels for the build; else wheels of a local PIP_FIND_LINKS are handed in
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.compose.hosts import HostProjects, host_address, host_environment, write_keys
from tests.integration.compose.project import ROOT, Compose

SAMPLES = ROOT / "models" / "digits-vl" / "samples"
BUILD_LIMIT_S = 1800.0
HOSTS_ENCODE_DELAY_MS = 2000  # so that a fault can befall a request whose image is being encoded


@pytest.fixture(scope="session")
def _docker_engine() -> None:
    """Skip where no engine with compose answers."""
    if shutil.which("docker") is None:
        pytest.skip("no Docker here: the docker command is missing")
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip(f"no Docker here: `{' '.join(command)}` does not answer")
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
            pytest.skip(f"no Docker here: `{' '.join(command)}` says {reason}")


@pytest.fixture(scope="session")
def compose(_docker_engine: None) -> Iterator[Compose]:
    """The project, not started yet; taken down at the end, whatever happened."""
    with _project("") as project:
        yield project


@contextlib.contextmanager
def _project(suffix: str, **more: str) -> Iterator[Compose]:
    """One on a port of its own; taken down at the end, whatever happened. `more`: of its environment."""
    model = Path(os.environ.get("TRIPTYCH_MODEL", ROOT / "models" / "digits-vl"))
    if not any(model.glob("*.safetensors")):
        pytest.skip(f"no weights in {model}; name a model folder with TRIPTYCH_MODEL")
    port = _free_port()
    env = {
        **os.environ,
        "TRIPTYCH_MODEL": str(model.resolve()),
        "TRIPTYCH_PORT": str(port),
        "TRIPTYCH_PROMETHEUS_PORT": str(_free_port()),
        "TRIPTYCH_WHEELS": os.environ.get("TRIPTYCH_WHEELS") or _image_of_local_wheels(),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "",
        **more,
    }
    project = Compose(f"triptych-test-{os.getpid()}{suffix}", port, env)
    try:
        yield project
    finally:
        project.attempt("down", "--volumes", "--remove-orphans", "--timeout", "20")


@pytest.fixture(scope="session")
def system(compose: Compose) -> Compose:
    """The project, built and up: every service healthy."""
    compose.run("build", limit_s=BUILD_LIMIT_S)
    compose.up()
    return compose


@pytest.fixture
def in_two_stages(_docker_engine: None) -> Iterator[Compose]:
    """The project with compose.epd.yaml on top, up as that file says."""
    with _project("-epd", COMPOSE_FILE=os.pathsep.join(("compose.yaml", "compose.epd.yaml"))) as project:
        project.run("build", limit_s=BUILD_LIMIT_S)
        project.up()
        yield project


@pytest.fixture(scope="module")
def two_hosts(_docker_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProjects]:
    """Projects of compose.host.yaml: `a` has Redis, the gateway and the encoder, `b` the prefill_decode."""
    keys = tmp_path_factory.mktemp("keys")
    key, other_key = keys / "fabric.key", keys / "other.key"
    password, names = secrets.token_hex(16), ("a", "b")
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(host_address(f"triptych-test-{os.getpid()}-address-{name}")) for name in names
        ]
        of_first = {
            "COMPOSE_PROFILES": "first",
            "TRIPTYCH_DEBUG_ENCODE_DELAY_MS": str(HOSTS_ENCODE_DELAY_MS),
        }
        first, second = (
            stack.enter_context(
                _project(f"-{name}", **host_environment(name, address, addresses[0], password, key), **more)
            )
            for name, address, more in zip(names, addresses, (of_first, {}), strict=True)
        )
        first.run("build", limit_s=BUILD_LIMIT_S)
        write_keys(key, other_key)
        hosts = HostProjects(first, second, key, other_key)
        hosts.start()
        yield hosts


@pytest.fixture(scope="session")
def samples() -> Callable[[int], tuple[bytes, str]]:
    """Held-out handwriting by number: a PNG, and what is to be read in it, e.g. `7 7 2`."""
    listing = json.loads((SAMPLES / "samples.json").read_text())

    def sample(number: int) -> tuple[bytes, str]:
        return (SAMPLES / listing[number]["file"]).read_bytes(), listing[number]["digits"]

    return sample


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _image_of_local_wheels() -> str:
    """`scratch`, or an image with the wheels of the folder where this machine's pip looks first."""
    folder = Path(os.environ.get("PIP_FIND_LINKS", ""))
    if not (folder.is_absolute() and any(folder.glob("*.whl"))):
        return "scratch"
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", "triptych-wheels", "--file", "-", str(folder)],
        input="FROM scratch\nCOPY *.whl /\n",
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=True,
    )
    return "triptych-wheels"
