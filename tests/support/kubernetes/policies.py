"""Rules that every pod of every overlay keeps. A rule yields the faults that it finds, each a sentence."""

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from tests.support.kubernetes.manifests import (
    Manifest,
    PodTemplate,
    environment,
    matches,
    named,
    of_kind,
    pod_templates,
)

Rule = Callable[[list[Manifest]], Iterator[str]]

END_S = 15  # from the end of a drain to the end of the process: an engine's own processes
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "m": 1e-3, "": 1}
QUANTITY = re.compile(r"^(\d+)(Ki|Mi|Gi|m|)$")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def quantity(text: str) -> float:
    """Return bytes or cores of a resource quantity."""
    found = QUANTITY.match(text)
    assert found is not None, f"quantity {text}"
    return int(found[1]) * UNITS[found[2]]


def _serving(manifests: list[Manifest]) -> Iterator[PodTemplate]:
    """Pods that run until they are ended."""
    return (pod for pod in pod_templates(manifests) if pod.kind != "Job")


def _is_dialled(manifests: list[Manifest], pod: PodTemplate) -> bool:
    """True if a Service or an InferencePool sends connections to the pod."""
    services = (each["spec"]["selector"] for each in of_kind(manifests, "Service"))
    pools = (each["spec"]["selector"]["matchLabels"] for each in of_kind(manifests, "InferencePool"))
    return any(matches({"matchLabels": each}, pod.labels) for each in (*services, *pools))


def probes_are_the_services_checks(manifests: list[Manifest]) -> Iterator[str]:
    for pod in _serving(manifests):
        missing = [probe for probe in PROBES if "exec" not in pod.main.get(probe, {})]
        if missing:
            yield f"{pod.name} has no {' and no '.join(missing)} by a command"
            continue
        commands = {probe: pod.main[probe]["exec"]["command"] for probe in PROBES}
        if pod.name == "redis":
            if not all("redis-cli ping" in each[-1] for each in commands.values()):
                yield "redis is not pinged"
            continue
        words = pod.main.get(
            "command", ["python", "-m", f"triptych_{pod.labels['app.kubernetes.io/component']}"]
        )[2:]
        check = ["python", "-m", *words, "healthcheck"]
        if commands["startupProbe"] != check or commands["readinessProbe"] != check:
            yield f"{pod.name} is ready by another command than {check}"
        if commands["livenessProbe"] != [
            "python", "-m", "triptych_common.runtime.healthcheck", "--liveness", *words,
        ]:  # fmt: skip
            yield f"{pod.name} is restarted by another check than that of a process that hangs"


def the_grace_is_longer_than_the_drain(manifests: list[Manifest]) -> Iterator[str]:
    for pod in _serving(manifests):
        hook = pod.main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if _is_dialled(manifests, pod) and hook[:1] != ["sleep"]:
            yield f"{pod.name} ends while Services send to it: no preStop"
        drain_s = float(environment(manifests, pod.main).get("TRIPTYCH_DRAIN_TIMEOUT_S") or 0)
        needed_s = drain_s + float(hook[1] if hook else 0) + END_S
        if pod.spec.get("terminationGracePeriodSeconds", 30) < needed_s:
            yield f"{pod.name} is killed before its drain ends: it needs {needed_s} s"


def evictions_take_one_at_a_time(manifests: list[Manifest]) -> Iterator[str]:
    budgets = list(of_kind(manifests, "PodDisruptionBudget"))
    for pod in pod_templates(manifests):
        if pod.kind not in ("Deployment", "StatefulSet"):
            continue
        found = [each["spec"] for each in budgets if matches(each["spec"]["selector"], pod.labels)]
        if [each.get("maxUnavailable") for each in found] != [1]:
            yield f"{pod.name} has not one PodDisruptionBudget with maxUnavailable 1"


def replicas_are_spread_over_nodes(manifests: list[Manifest]) -> Iterator[str]:
    several_nodes = any(pod.name == "fabric" for pod in pod_templates(manifests))
    for pod in pod_templates(manifests):
        if pod.kind != "Deployment":
            continue
        spreads = [
            each
            for each in pod.spec.get("topologySpreadConstraints", ())
            if each["topologyKey"] == "kubernetes.io/hostname" and matches(each["labelSelector"], pod.labels)
        ]
        if not spreads:
            yield f"{pod.name} is not spread over nodes"
        terms = pod.spec.get("affinity", {}).get("podAntiAffinity", {})
        if several_nodes and "llm-d.ai/role" in pod.labels and not terms:
            yield f"{pod.name} has no anti-affinity, though GPUs are on several nodes"


def requests_and_limits_are_set(manifests: list[Manifest]) -> Iterator[str]:
    for pod in pod_templates(manifests):
        for container in pod.containers:
            resources = container.get("resources", {})
            requests, limits = resources.get("requests", {}), resources.get("limits", {})
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                yield f"{container['name']} of {pod.name} lacks requests or a limit of memory"
            elif quantity(limits["memory"]) < quantity(requests["memory"]):
                yield f"{container['name']} of {pod.name} requests more memory than it may have"
        region = environment(manifests, pod.main).get("TRIPTYCH_REGION_BYTES")
        if region and quantity(pod.main["resources"]["limits"]["memory"]) < int(region) * 1.2:
            yield f"{pod.name} has no memory for its region"


def containers_have_no_rights(manifests: list[Manifest]) -> Iterator[str]:
    for pod in pod_templates(manifests):
        spec, confined = pod.spec, pod.spec.get("securityContext", {})
        if not confined.get("runAsNonRoot") or not confined.get("runAsUser"):
            yield f"{pod.name} may run as root"
        if confined.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{pod.name} has no seccomp profile"
        if spec.get("automountServiceAccountToken") is not False:
            yield f"{pod.name} has a token of the API server"
        if spec.get("hostNetwork") or spec.get("hostIPC"):
            yield f"{pod.name} has the host's network or its shared memory objects"
        if spec.get("hostPID"):
            if spec.get("shareProcessNamespace"):
                yield f"{pod.name} has the host's processes and its own at once"
            if not _has_slab(manifests):
                yield f"{pod.name} sees the host's processes though no slab needs it"
        for container in pod.containers:
            own = container.get("securityContext", {})
            wanted = {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            if own != wanted:
                yield f"{container['name']} of {pod.name} has rights: {own}"


def _has_slab(manifests: list[Manifest]) -> bool:
    stores = (pod for pod in pod_templates(manifests) if pod.name == "cache-store")
    return any(int(environment(manifests, pod.main).get("TRIPTYCH_SLAB_BYTES") or 0) for pod in stores)


def folders_that_are_written_are_volumes(manifests: list[Manifest]) -> Iterator[str]:
    for pod in pod_templates(manifests):
        volumes = {each["name"]: each for each in pod.spec.get("volumes", ())}
        for volume in volumes.values():
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{volume['name']} of {pod.name} has no limit of its size"
            if "hostPath" in volume and volume["hostPath"] != {"path": "/dev/shm", "type": "Directory"}:
                yield f"{pod.name} has {volume['hostPath']} of the node"
        mounted = {
            each["mountPath"]: volumes[each["name"]]
            for each in pod.main.get("volumeMounts", ())
            if not each.get("readOnly")
        }
        variables = environment(manifests, pod.main)
        for name in ("HOME", "TRIPTYCH_RUN_DIR", "TRIPTYCH_TRACES_DIR", "TRIPTYCH_FILES_DIR"):
            path = PurePosixPath(variables.get(name) or "/tmp")
            if not any(path.is_relative_to(each) for each in mounted) and pod.name != "redis":
                yield f"{name} of {pod.name} is in no volume"
        files = variables.get("TRIPTYCH_FILES_DIR")
        if files:
            volume = next(mounted[str(each)] for each in PurePosixPath(files).parents if str(each) in mounted)
            if "persistentVolumeClaim" not in volume:
                yield f"files of {pod.name} are on no claim"
            # Each mount would else open the folder to its group, and the gateway refuses one that is open.
            if pod.spec["securityContext"].get("fsGroupChangePolicy") != "OnRootMismatch":
                yield f"rights of the files of {pod.name} are changed by each mount"


def networks_let_pass_what_is_listed(manifests: list[Manifest]) -> Iterator[str]:
    policies = [each["spec"] for each in of_kind(manifests, "NetworkPolicy")]
    for pod in pod_templates(manifests):
        own = [each for each in policies if matches(each["podSelector"], pod.labels)]
        if {kind for each in own for kind in each["policyTypes"]} != {"Ingress", "Egress"}:
            yield f"{pod.name} has no policy that denies"
        ports = {each["name"]: each["containerPort"] for each in pod.main.get("ports", ())}
        for ingress in (rule for each in own for rule in each.get("ingress", ())):
            names = {each["port"] for each in ingress.get("ports", ())}
            if "from" not in ingress and names != {"http"}:
                yield f"{pod.name}: everybody reaches {names or 'all ports'}"
            if any(isinstance(each, int) for each in names):
                yield f"{pod.name}: a port is let in by number"
        allowed = {
            port["port"] for each in own for rule in each.get("ingress", ()) for port in rule.get("ports", ())
        }
        if not ports.keys() <= allowed:
            yield f"{pod.name}: nobody reaches {ports.keys() - allowed}"


def priorities_exist(manifests: list[Manifest]) -> Iterator[str]:
    known = {each["metadata"]["name"] for each in of_kind(manifests, "PriorityClass")}
    for pod in pod_templates(manifests):
        if pod.spec.get("priorityClassName") not in known:
            yield f"{pod.name} has no priority class"
    for each in of_kind(manifests, "PriorityClass"):
        if each.get("preemptionPolicy") != "Never":
            yield f"{each['metadata']['name']} displaces pods of others"


def ports_are_named(manifests: list[Manifest]) -> Iterator[str]:
    for pod in pod_templates(manifests):
        ports = [port for container in pod.containers for port in container.get("ports", ())]
        names = [each.get("name") for each in ports]
        if None in names or len(set(names)) < len(names):
            yield f"{pod.name} has a port without a name of its own: {ports}"
    for service in of_kind(manifests, "Service"):
        for port in service["spec"]["ports"]:
            if "name" not in port or not isinstance(port.get("targetPort"), str):
                yield f"Service {service['metadata']['name']} has a port without names"


def images_have_versions(manifests: list[Manifest]) -> Iterator[str]:
    for pod in pod_templates(manifests):
        for container in pod.containers:
            tag = container["image"].rpartition(":")[2] if ":" in container["image"] else ""
            if tag in ("", "latest"):
                yield f"{container['name']} of {pod.name} has {container['image']}, of no version"


def settings_exist(manifests: list[Manifest]) -> Iterator[str]:
    maps = {each["metadata"]["name"] for each in of_kind(manifests, "ConfigMap")}
    for pod in pod_templates(manifests):
        for source in pod.main.get("envFrom", ()):
            name = source.get("configMapRef", {}).get("name")
            if name is not None and name not in maps:
                yield f"{pod.name} has no ConfigMap {name}"
            elif name is not None:
                for key, value in named(manifests, "ConfigMap", name)["data"].items():
                    if "${" in value:
                        yield f"{key} of {name} is Compose's: {value}"


RULES: tuple[Rule, ...] = (
    probes_are_the_services_checks,
    the_grace_is_longer_than_the_drain,
    evictions_take_one_at_a_time,
    replicas_are_spread_over_nodes,
    requests_and_limits_are_set,
    containers_have_no_rights,
    folders_that_are_written_are_volumes,
    networks_let_pass_what_is_listed,
    priorities_exist,
    ports_are_named,
    images_have_versions,
    settings_exist,
)
