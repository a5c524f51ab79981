"""One node of Kubernetes, played on a Docker engine: it runs the pods of rendered manifests.

Done as a kubelet and the controllers do it, as far as manifests of this project go: a sandbox with the pod's
network and processes, init containers, volumes, variables, security contexts, memory limits, probes as
`exec`, restarts, replacements, `preStop` and the grace at the end, names of Services. Not done: scheduling,
network policies, quotas of volumes.
"""

import itertools
import json
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kubernetes.manifests import (
    Manifest,
    PodTemplate,
    environment,
    of_kind,
    pod_templates,
)
from tests.support.waiting import wait_until

COMMAND_LIMIT_S = 120.0
START_LIMIT_S = 580.0  # of two engines at once; below pytest's limit for one test
SANDBOX_IMAGE = "redis:7"
FS_GROUP_MODE = 0o2775
NODE_NAME = "node-1"
VARIABLE = re.compile(r"\$\((\w+)\)")


def docker(*arguments: str, limit_s: float = COMMAND_LIMIT_S) -> str:
    done = attempt(*arguments, limit_s=limit_s)
    assert done.returncode == 0, f"docker {' '.join(arguments[:4])} …:\n{done.stderr[-3000:]}"
    return done.stdout.strip()


def attempt(*arguments: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, timeout=limit_s, check=False
    )


@dataclass
class Pod:
    """A running pod; `sandbox` and `container` are names of Docker containers."""

    template: PodTemplate
    name: str
    sandbox: str
    container: str
    ip: str = ""
    volumes: list[str] = field(default_factory=list)
    probed_at: float = 0.0  # by the monotonic clock
    has_started: bool = False

    def execute(self, *command: str, limit_s: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        return attempt("exec", self.container, *command, limit_s=limit_s)

    def passes(self, probe: str) -> bool:
        settings = self.template.main[probe]
        try:
            done = self.execute(*settings["exec"]["command"], limit_s=settings["timeoutSeconds"])
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def state(self) -> dict[str, Any]:
        """Docker's view of the main container."""
        (found,) = json.loads(docker("inspect", self.container))
        return dict(found)

    def is_running(self) -> bool:
        return bool(self.state()["State"]["Running"])

    def log(self) -> str:
        done = attempt("logs", "--tail", "60", self.container)
        return done.stdout + done.stderr


class Node:
    """A node with one namespace, filled from `manifests`.

    Args:
        folder: where claims and secrets lie; all of it may go afterwards.
        given: data of Secrets that users make.
    """

    def __init__(
        self, manifests: list[Manifest], folder: Path, given: dict[str, dict[str, str]], namespace: str
    ) -> None:
        self.manifests, self.namespace = manifests, namespace
        self._folder, self._secrets = folder, given
        self._network = namespace
        self._numbers = itertools.count()
        self.pods: dict[str, Pod] = {}  # by their workload's name
        docker("network", "create", self._network)

    # ---- controllers -----------------------------------------------------------------------------
    def start(self) -> None:
        """Start one pod of each workload; returns when all are ready."""
        for template in pod_templates(self.manifests):
            self.pods[template.name] = self._run(template)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Restart containers that have ended, until every pod passes its startup and readiness probes."""
        waiting = list(self.pods.values())

        def none_waits() -> bool:
            waiting[:] = [pod for pod in waiting if not self._is_ready(pod)]
            return not waiting

        def case() -> str:
            return "\n".join(f"pod {pod.name} is ready; its log:\n{pod.log()}" for pod in waiting)

        wait_until(none_waits, START_LIMIT_S, case)

    def replace(self, name: str) -> Pod:
        """Kill a pod with all its processes at once, and start another one in its place."""
        old = self.pods[name]
        self._remove(old)
        self.pods[name] = self._run(old.template)
        return self.pods[name]

    def terminate(self, pod: Pod) -> int:
        """End a pod as its deletion does; returns the exit code of its main process."""
        grace_s = pod.template.spec["terminationGracePeriodSeconds"]
        hook = pod.template.main.get("lifecycle", {}).get("preStop")
        if hook is not None:
            assert pod.execute(*hook["exec"]["command"], limit_s=grace_s).returncode == 0
        docker("stop", "--time", str(grace_s), pod.container, limit_s=grace_s + COMMAND_LIMIT_S)
        code = int(pod.state()["State"]["ExitCode"])
        self._remove(pod)
        del self.pods[pod.template.name]
        return code

    def close(self) -> None:
        """Remove whatever is left of this node, also what a killed store leaves."""
        for pod in self.pods.values():
            self._remove(pod)
        for kind, found in self.leftovers().items():
            for each in found:
                attempt(kind, "rm", "--force", each) if kind != "network" else attempt(kind, "rm", each)
        shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def memory(self) -> Path:
        """Folder of the store in the node's memory."""
        return Path("/dev/shm") / f"triptych-{self.namespace}"

    def leftovers(self) -> dict[str, list[str]]:
        """Containers, volumes and networks of this node."""
        return {
            kind: docker(kind, "ls", *more, "--quiet", "--filter", f"name={self.namespace}").split()
            for kind, more in (("container", ["--all"]), ("volume", []), ("network", []))
        }

    def _is_ready(self, pod: Pod) -> bool:
        """Probe as often as the pod says: a probe is a process, and slows a start."""
        probe = "readinessProbe" if pod.has_started else "startupProbe"
        if time.monotonic() - pod.probed_at < pod.template.main[probe]["periodSeconds"]:
            return False
        if not pod.is_running():
            pod.has_started = False
            docker("start", pod.container)
        passes = pod.passes(probe)
        pod.probed_at = 0.0 if passes else time.monotonic()
        pod.has_started |= passes
        return passes and probe == "readinessProbe"

    # ---- the kubelet -----------------------------------------------------------------------------
    def _run(self, template: PodTemplate) -> Pod:
        name = template.spec.get("hostname") or f"{template.name}-{secrets.token_hex(3)}"
        base = f"{self.namespace}-{name}-{next(self._numbers)}"
        pod = Pod(template, name, f"{base}-sandbox", f"{base}-main")
        mounts = dict(self._make_volumes(pod))
        docker(
            "run", "--detach", "--init", "--name", pod.sandbox, "--hostname", name,
            "--network", self._network, *(f"--network-alias={each}" for each in self._services_of(template)),
            *(f"--volume={each}:/held/{each}" for each in pod.volumes),  # a tmpfs goes with its last mount
            "--user", "65534", "--cap-drop", "ALL", "--read-only",
            "--entrypoint", "sleep", SANDBOX_IMAGE, "infinity",
        )  # fmt: skip
        (found,) = json.loads(docker("inspect", pod.sandbox))
        pod.ip = found["NetworkSettings"]["Networks"][self._network]["IPAddress"]
        for container in template.spec.get("initContainers", ()):
            options, command = self._options(pod, container, mounts)
            docker("run", "--rm", "--name", f"{base}-init", *options, *command)
        options, command = self._options(pod, template.main, mounts)
        docker("run", "--detach", "--name", pod.container, *options, *command)
        return pod

    def _remove(self, pod: Pod) -> None:
        attempt("rm", "--force", "--volumes", pod.container, pod.sandbox)
        for each in pod.volumes:
            attempt("volume", "rm", each)

    def _services_of(self, template: PodTemplate) -> Iterator[str]:
        for service in of_kind(self.manifests, "Service"):
            if service["spec"]["selector"].items() <= template.labels.items():
                yield service["metadata"]["name"]

    def _make_volumes(self, pod: Pod) -> Iterator[tuple[str, str]]:
        """Source of each volume, as `docker run --volume` takes it."""
        for volume in pod.template.spec.get("volumes", ()):
            name = volume["name"]
            if "hostPath" in volume:
                yield name, volume["hostPath"]["path"]
            elif "emptyDir" in volume:
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                made = f"{pod.container}-{name}"
                options = {
                    "type": "tmpfs",
                    "device": "tmpfs",
                    "o": f"size={size},mode=2777,gid={_group(pod)}",
                }
                docker("volume", "create", *(f"--opt={key}={value}" for key, value in options.items()), made)
                pod.volumes.append(made)
                yield name, made
            elif "persistentVolumeClaim" in volume:
                yield name, str(self._shared_folder("claims", volume["persistentVolumeClaim"]["claimName"]))
            elif "secret" in volume:
                yield name, str(self._secret_folder(pod, volume["secret"]))
            else:
                raise NotImplementedError(f"volume {volume}")

    def _shared_folder(self, *parts: str) -> Path:
        folder = self._folder.joinpath(*parts)
        if not folder.is_dir():
            folder.mkdir(parents=True)
            os.chown(folder, -1, 10001)
            folder.chmod(FS_GROUP_MODE)
        return folder

    def _secret_folder(self, pod: Pod, source: Manifest) -> Path:
        folder = self._shared_folder("secrets", source["secretName"])
        data = self._secrets.get(source["secretName"])
        assert data is not None or source.get("optional"), f"no Secret {source['secretName']}"
        for key, value in (data or {}).items():
            file = folder / key
            file.write_text(value)
            os.chown(file, -1, _group(pod))
            file.chmod(source["defaultMode"])
        return folder

    def _options(self, pod: Pod, container: Manifest, mounts: dict[str, str]) -> tuple[list[str], list[str]]:
        """Options of `docker run`, then image and command."""
        confined, own = pod.template.spec["securityContext"], container["securityContext"]
        options = [
            f"--network=container:{pod.sandbox}",
            f"--user={confined['runAsUser']}:{confined['runAsGroup']}",
            f"--group-add={_group(pod)}",
            *(f"--cap-drop={each}" for each in own["capabilities"]["drop"]),
            f"--memory={container['resources']['limits']['memory'].removesuffix('i').lower()}",
        ]
        if pod.template.spec.get("shareProcessNamespace"):
            options.append(f"--pid=container:{pod.sandbox}")
        if own["readOnlyRootFilesystem"]:
            options.append("--read-only")
        if not own["allowPrivilegeEscalation"]:
            options.append("--security-opt=no-new-privileges")
        for mount in container.get("volumeMounts", ()):
            source = mounts[mount["name"]]
            modes = ["ro"] * bool(mount.get("readOnly")) + ["nocopy"] * (source in pod.volumes)
            options.append(":".join((f"--volume={source}", mount["mountPath"], ",".join(modes) or "rw")))
        options += [f"--env={key}={value}" for key, value in self._environment(pod, container).items()]
        command = [*container.get("command", ()), *container.get("args", ())]
        if container.get("command"):
            options.append(f"--entrypoint={command.pop(0)}")
        return options, [container["image"], *command]

    def _environment(self, pod: Pod, container: Manifest) -> dict[str, str]:
        found = environment(self.manifests, {"envFrom": container.get("envFrom", ())})
        for source in container.get("envFrom", ()):
            if "secretRef" in source:
                found |= self._secrets[source["secretRef"]["name"]]
        for each in container.get("env", ()):
            value = each.get("value")
            if value is None:
                value = self._value_from(pod, each["valueFrom"])
            if value is not None:
                found[each["name"]] = VARIABLE.sub(lambda name: found[name[1]], value)
        return found

    def _value_from(self, pod: Pod, source: Manifest) -> str | None:
        if "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            return self._secrets.get(reference["name"], {}).get(reference["key"])
        path = source["fieldRef"]["fieldPath"]
        if path.startswith("metadata.labels['"):
            return pod.template.labels[path.partition("'")[2].removesuffix("']")]
        known = {
            "status.podIP": pod.ip,
            "spec.nodeName": NODE_NAME,
            "metadata.namespace": self.namespace,
            "metadata.name": pod.name,
        }
        return known[path]


def _group(pod: Pod) -> int:
    return int(pod.template.spec["securityContext"]["fsGroup"])
