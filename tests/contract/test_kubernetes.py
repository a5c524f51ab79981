"""deploy/kubernetes: overlays fit three versions of the API, keep the rules and have Compose's settings.

Custom resources have no schema here: what this project uses of them is compared with the fields that their
definitions have (KEDA 2.20, Prometheus operator 0.93, v1 of the Gateway API and of its inference extension).
"""

import copy
import importlib.metadata
import re
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.contract.test_compose import COMPOSE, COMPOSE_GPU, ENV_FILES, SETTINGS, default_of, loaded
from tests.contract.test_docs import ROOT
from tests.contract.test_metrics import PAGE
from tests.support.kubernetes.manifests import (
    KUBERNETES,
    OVERLAYS,
    Manifest,
    PodTemplate,
    environment,
    named,
    of_kind,
    overlay,
    pod_templates,
    render,
    render_layout,
)
from tests.support.kubernetes.policies import (
    RULES,
    Rule,
    containers_have_no_rights,
    evictions_take_one_at_a_time,
    folders_that_are_written_are_volumes,
    images_have_versions,
    networks_let_pass_what_is_listed,
    ports_are_named,
    priorities_exist,
    probes_are_the_services_checks,
    replicas_are_spread_over_nodes,
    requests_and_limits_are_set,
    settings_exist,
    the_grace_is_longer_than_the_drain,
)
from tests.support.observability import RULES as ALERTS
from tests.support.observability import selectors

SCHEMAS = "kubernetes-json-schema"  # in kubernetes_validate
VERSIONS = ("1.35", "1.36", "1.37")
GUIDE = (ROOT / "docs" / "guide" / "kubernetes.md").read_text()
CUSTOM = {
    "keda.sh/v1alpha1": "ScaledObject",
    "gateway.networking.k8s.io/v1": "HTTPRoute",
    "inference.networking.k8s.io/v1": "InferencePool",
    "monitoring.coreos.com/v1": "PodMonitor",
}
EXTERNAL_REDIS = "external-redis"
EVERYTHING = "everything"
OWN = {
    EXTERNAL_REDIS: ("base", "roles/prefill-decode", ("redis-external", "files", "fabric", "gpu")),
    EVERYTHING: (
        "base", "roles/prefill", "roles/decode",
        ("redis", "fabric", "gpu", "observability", "keda-epd"),
    ),
}  # fmt: skip
"""Layouts that a user puts together, as the guide says."""
LAYOUTS = (*OVERLAYS, "model", *OWN)


@pytest.fixture(scope="session")
def own_layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    folder = tmp_path_factory.mktemp("layouts")
    return {
        name: render_layout(folder, resources, components, name)
        for name, (*resources, components) in OWN.items()
    }


@pytest.fixture
def manifests(request: pytest.FixtureRequest, own_layouts: dict[str, list[Manifest]]) -> list[Manifest]:
    """Manifests of the layout that parametrizes the test."""
    name: str = request.param
    if name in own_layouts:
        return copy.deepcopy(own_layouts[name])
    return render(KUBERNETES / "model") if name == "model" else overlay(name)


every_layout = pytest.mark.parametrize("manifests", LAYOUTS, indirect=True)


@cache
def definitions(version: str) -> Registry:
    """Definitions of the API, by their ids; crawled once, which takes a second."""
    contents = schema_contents(f"{SCHEMAS}/v{version}.0-local-strict/_definitions.json", version)
    return (Resource.from_contents(contents) @ Registry()).crawl()


@cache
def validator(version: str, api_version: str, kind: str) -> Draft202012Validator:
    """Validator of one kind, which refuses unknown fields; made once, other than by kubernetes_validate."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{SCHEMAS}/v{version}.0-local-strict/{kind.lower()}-{group}.json", version)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ definitions(version))


def faults_of(rule: Rule, manifests: list[Manifest]) -> list[str]:
    return list(rule(manifests))


@every_layout
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_api(manifests: list[Manifest], version: str) -> None:
    assert manifests
    for each in manifests:
        if each["apiVersion"] not in CUSTOM:
            found = validator(version, each["apiVersion"], each["kind"]).iter_errors(each)
            faults = [f"{each['metadata']['name']} {fault.json_path}: {fault.message}" for fault in found]
            assert not faults


def test_a_manifest_that_the_api_refuses_is_found() -> None:
    manifest = named(overlay("cpu"), "Deployment", "gateway")
    manifest["spec"]["template"]["spec"]["priorityClass"] = "triptych-core"
    (fault,) = validator(VERSIONS[0], "apps/v1", "Deployment").iter_errors(manifest)
    assert "priorityClass" in fault.message


@every_layout
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_pods_keep_the_rule(manifests: list[Manifest], rule: Rule) -> None:
    assert pod_templates(manifests)
    assert not faults_of(rule, manifests)


# ---- each rule finds what breaks it --------------------------------------------------------------
def of(manifests: list[Manifest], kind: str, name: str) -> PodTemplate:
    return PodTemplate(named(manifests, kind, name))


def drop(manifests: list[Manifest], kind: str, name: str) -> None:
    manifests.remove(named(manifests, kind, name))


def gateway(manifests: list[Manifest]) -> PodTemplate:
    return of(manifests, "Deployment", "gateway")


def encoder(manifests: list[Manifest]) -> PodTemplate:
    return of(manifests, "Deployment", "encoder")


def store(manifests: list[Manifest]) -> PodTemplate:
    return of(manifests, "DaemonSet", "cache-store")


def settings(manifests: list[Manifest], name: str) -> dict[str, str]:
    """Data of the ConfigMap `name`, whose full name has a hash."""
    (found,) = (
        each["data"]
        for each in of_kind(manifests, "ConfigMap")
        if each["metadata"]["name"].rpartition("-")[0] == name
    )
    return cast(dict[str, str], found)


Break = Callable[[list[Manifest]], object]
MUTATIONS: dict[Rule, dict[str, Break]] = {
    probes_are_the_services_checks: {
        "no liveness": lambda m: encoder(m).main.pop("livenessProbe"),
        "ready by HTTP": lambda m: gateway(m).main.update(
            readinessProbe={"httpGet": {"path": "/health", "port": "http"}}
        ),
        "another service's check": lambda m: (
            encoder(m).main["startupProbe"].update(exec={"command": ["true"]})
        ),
        "liveness is readiness": lambda m: store(m).main.update(
            livenessProbe=store(m).main["readinessProbe"]
        ),
    },
    the_grace_is_longer_than_the_drain: {
        "no grace": lambda m: encoder(m).spec.pop("terminationGracePeriodSeconds"),
        "a longer drain": lambda m: settings(m, "gateway").update(TRIPTYCH_DRAIN_TIMEOUT_S="131"),
        "no preStop": lambda m: gateway(m).main.pop("lifecycle"),
    },
    evictions_take_one_at_a_time: {
        "no budget": lambda m: drop(m, "PodDisruptionBudget", "redis"),
        "a budget that blocks": lambda m: named(m, "PodDisruptionBudget", "gateway")["spec"].update(
            maxUnavailable=0
        ),
        "a budget of others": lambda m: named(m, "PodDisruptionBudget", "encoder")["spec"].update(
            selector={"matchLabels": {"a": "b"}}
        ),
    },
    replicas_are_spread_over_nodes: {
        "no spread": lambda m: gateway(m).spec.pop("topologySpreadConstraints"),
        "a spread of others": lambda m: (
            encoder(m).spec["topologySpreadConstraints"][0].update(labelSelector={"matchLabels": {"a": "b"}})
        ),
        "no anti-affinity": lambda m: encoder(m).spec.pop("affinity"),
    },
    requests_and_limits_are_set: {
        "no limit": lambda m: gateway(m).main["resources"].pop("limits"),
        "no request": lambda m: encoder(m).main["resources"]["requests"].pop("cpu"),
        "a limit below the request": lambda m: gateway(m).main["resources"]["limits"].update(memory="1Mi"),
        "a region above the limit": lambda m: settings(m, "cache-store").update(
            TRIPTYCH_REGION_BYTES=str(8 << 30)
        ),
        "an init container without requests": lambda m: (
            of(m, "DaemonSet", "fabric").spec["initContainers"][0].pop("resources")
        ),
    },
    containers_have_no_rights: {
        "root": lambda m: gateway(m).spec["securityContext"].update(runAsUser=0),
        "perhaps root": lambda m: encoder(m).spec["securityContext"].pop("runAsNonRoot"),
        "no seccomp": lambda m: store(m).spec["securityContext"].pop("seccompProfile"),
        "a token": lambda m: encoder(m).spec.pop("automountServiceAccountToken"),
        "the host's network": lambda m: gateway(m).spec.update(hostNetwork=True),
        "the host's processes": lambda m: encoder(m).spec.update(hostPID=True),
        "a root that can be written": lambda m: (
            gateway(m).main["securityContext"].update(readOnlyRootFilesystem=False)
        ),
        "a capability": lambda m: (
            encoder(m).main["securityContext"].update(capabilities={"drop": ["ALL"], "add": ["SYS_PTRACE"]})
        ),
        "privileged": lambda m: store(m).main["securityContext"].update(privileged=True),
        "an init container with rights": lambda m: (
            of(m, "DaemonSet", "fabric").spec["initContainers"][0].pop("securityContext")
        ),
    },
    folders_that_are_written_are_volumes: {
        "a folder in no volume": lambda m: settings(m, "pod").update(
            TRIPTYCH_TRACES_DIR="/var/lib/triptych/traces"
        ),
        "files on no claim": lambda m: settings(m, "gateway").update(TRIPTYCH_FILES_DIR="/tmp/files"),
        "a volume without a limit": lambda m: gateway(m).spec["volumes"][0].update(emptyDir={}),
        "a folder of the node": lambda m: (
            store(m).spec["volumes"][1].update(hostPath={"path": "/", "type": "Directory"})
        ),
    },
    networks_let_pass_what_is_listed: {
        "nothing denied": lambda m: [drop(m, "NetworkPolicy", each) for each in ("deny-all", "dns")],
        "metrics for everybody": lambda m: named(m, "NetworkPolicy", "metrics")["spec"]["ingress"][0].pop(
            "from"
        ),
        "all ports": lambda m: named(m, "NetworkPolicy", "redis")["spec"]["ingress"][0].pop("from"),
        "a port that nobody reaches": lambda m: drop(m, "NetworkPolicy", "fabric"),
    },
    priorities_exist: {
        "no priority": lambda m: gateway(m).spec.pop("priorityClassName"),
        "a priority that there is not": lambda m: drop(m, "PriorityClass", "triptych-encoder"),
        "a priority that displaces": lambda m: named(m, "PriorityClass", "triptych-core").pop(
            "preemptionPolicy"
        ),
    },
    ports_are_named: {
        "a port without a name": lambda m: encoder(m).main["ports"][0].pop("name"),
        "a Service by number": lambda m: named(m, "Service", "gateway")["spec"]["ports"][0].update(
            targetPort=8000
        ),
    },
    images_have_versions: {
        "latest": lambda m: gateway(m).main.update(image="triptych-gateway:latest"),
        "no tag": lambda m: encoder(m).main.update(image="registry.example/triptych-engine"),
        "no tag behind a port": lambda m: (
            of(m, "DaemonSet", "fabric").spec["initContainers"][0].update(image="triptych-cache_store")
        ),
    },
    settings_exist: {
        "no settings": lambda m: encoder(m).main["envFrom"][0].update(configMapRef={"name": "encoder"}),
        "an expression of Compose's": lambda m: settings(m, "encoder").update(
            TRIPTYCH_ENGINE_ARGS="${TRIPTYCH_ENCODER_ARGS:-}"
        ),
    },
}


@pytest.mark.parametrize(
    ("rule", "mutate"),
    [
        pytest.param(rule, mutate, id=name)
        for rule, mutations in MUTATIONS.items()
        for name, mutate in mutations.items()
    ],
)
def test_a_manifest_that_breaks_a_rule_is_found(rule: Rule, mutate: Break) -> None:
    manifests = overlay("hosts")
    mutate(manifests)
    assert faults_of(rule, manifests), f"{rule.__name__} finds no fault"


def test_every_rule_is_broken_once() -> None:
    assert set(MUTATIONS) == set(RULES)


# ---- one source ----------------------------------------------------------------------------------
CONFIG_MAPS = {name: name.replace("_", "-") for name in SETTINGS}
IN_CONFIG_MAPS = {
    "TRIPTYCH_DRAIN_TIMEOUT_S", "TRIPTYCH_ENGINE_ARGS", "TRIPTYCH_CORES", "TRIPTYCH_REGION_BYTES",
    "TRIPTYCH_SERVED_MODEL_NAME", "TRIPTYCH_FILES_DIR",
}  # fmt: skip
"""Settings with a value in the overlay `cpu`; all others are the user's, as in Compose."""


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_those_of_compose(name: str) -> None:
    data = settings(overlay("cpu"), CONFIG_MAPS[name])
    lines = (ENV_FILES / f"{name}.env").read_text().splitlines()[1:]
    assert set(data) == {line.partition("=")[0] for line in lines}
    assert {key for key, value in data.items() if value} <= IN_CONFIG_MAPS


@pytest.mark.parametrize("name", OVERLAYS)
def test_engines_have_the_variables_of_compose(name: str) -> None:
    """On a GPU, those of compose.gpu.yaml: what it removes is not here."""
    compose = loaded(COMPOSE)
    ours = settings(overlay(name), "engine")
    theirs = compose["x-engine-settings"]
    if of(overlay(name), "Deployment", "encoder").main["image"].partition(":")[0].endswith("-cuda"):
        on_gpu = {
            key: value
            for key, value in loaded(COMPOSE_GPU)["services"]["encoder"]["environment"].items()
            if not key.startswith(("TRIPTYCH_", "NVIDIA_"))
        }
        theirs = {key: value for key, value in (theirs | on_gpu).items() if value is not None}
    assert set(ours) == set(theirs) - set(compose["x-settings"])
    moved = {"TORCHINDUCTOR_CACHE_DIR"}  # to the pod's own folder
    for key in ours.keys() - moved:
        value = theirs[key]
        assert ours[key] == (default_of(value) if value.startswith("${") else value), key


@every_layout
def test_every_setting_is_one_of_its_service(manifests: list[Manifest]) -> None:
    for pod in pod_templates(manifests):
        component = pod.labels["app.kubernetes.io/component"]
        if component not in SETTINGS:
            continue
        known = {f"TRIPTYCH_{field}".upper() for field in SETTINGS[component].model_fields}
        shared = {"TRIPTYCH_MODEL"} if component == "encoder" else set()
        given = environment(manifests, pod.main).keys() | {each["name"] for each in pod.main["env"]}
        unknown = {key for key in given if key.startswith("TRIPTYCH_")} - known - shared
        assert not unknown, f"{component}: {unknown}"


@pytest.mark.parametrize("name", ["encoder", "prefill_decode", "gateway", "cache_store"])
def test_pods_are_the_services_of_compose(name: str) -> None:
    """Commands, ports, roles and the image."""
    service = yaml.safe_load(COMPOSE.read_text())["services"][name]
    pod = next(
        each for each in pod_templates(overlay("cpu")) if each.labels["app.kubernetes.io/component"] == name
    )
    assert pod.main.get("command") == service.get("command")
    assert pod.labels.get("llm-d.ai/role") == service.get("labels", {}).get("llm-d.ai/role")
    assert pod.main["image"].partition(":")[0] == service["image"].replace(
        "${TRIPTYCH_IMAGES:-triptych}", "triptych"
    )
    ours = {each["containerPort"] for each in pod.main["ports"]}
    names = ("TRIPTYCH_PORT", "TRIPTYCH_METRICS_PORT")
    assert {int(service["environment"][each]) for each in names if each in service["environment"]} <= ours
    assert pod.main["readinessProbe"]["exec"]["command"][2] == service["healthcheck"]["test"][-1]


def test_redis_is_that_of_compose() -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["redis"]
    redis = of(overlay("cpu"), "StatefulSet", "redis")
    assert redis.main["image"] == service["image"]
    (command,) = redis.main["args"]
    options = " ".join(each or '""' for each in service["command"][1:])
    assert options in " ".join(command.split())


def test_images_are_of_this_version() -> None:
    version = importlib.metadata.version("triptych-common")
    for pod in pod_templates(overlay("cpu")):
        for container in pod.containers:
            name, _, tag = container["image"].partition(":")
            assert tag == version or name == "redis", container["image"]


# ---- roles, GPUs ---------------------------------------------------------------------------------
def test_roles_have_pods_of_their_own() -> None:
    manifests = overlay("epd")
    roles = {
        pod.name: pod.labels["llm-d.ai/role"]
        for pod in pod_templates(manifests)
        if "llm-d.ai/role" in pod.labels
    }
    assert roles == {"encoder": "encode", "prefill": "prefill", "decode": "decode"}
    for name in ("prefill", "decode"):
        pod = of(manifests, "Deployment", name)
        assert pod.workload["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        (role,) = (each for each in pod.main["env"] if each["name"] == "TRIPTYCH_ROLE")
        assert role["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['llm-d.ai/role']"
    budgets = [
        tuple(sorted(each["spec"]["selector"]["matchLabels"].items()))
        for each in of_kind(manifests, "PodDisruptionBudget")
    ]
    assert len(budgets) == len(set(budgets))


def test_only_a_shared_gpu_needs_the_hosts_processes() -> None:
    for name in OVERLAYS:
        having = {pod.name for pod in pod_templates(overlay(name)) if pod.spec.get("hostPID")}
        wanted = {"cache-store", "encoder", "prefill-decode"} if name == "cuda-ipc" else set()
        assert having == wanted, name


def test_engines_have_gpus_and_the_store_one_for_its_slab_alone() -> None:
    def gpus(name: str) -> set[str]:
        limits = {pod.name: pod.main["resources"]["limits"] for pod in pod_templates(overlay(name))}
        return {each for each, limit in limits.items() if "nvidia.com/gpu" in limit}

    assert gpus("cpu") == set()
    assert gpus("gpu") == {"encoder", "prefill-decode"}
    assert gpus("cuda-ipc") == {"encoder", "prefill-decode", "cache-store"}


def test_engines_of_a_shared_gpu_have_the_memory_that_compose_gives_them() -> None:
    """The slab beside the engines has the same size, too."""
    manifests, services = overlay("cuda-ipc"), loaded(COMPOSE_GPU)["services"]
    for name, key in (
        ("encoder", "TRIPTYCH_ENGINE_ARGS"),
        ("prefill_decode", "TRIPTYCH_ENGINE_ARGS"),
        ("cache_store", "TRIPTYCH_SLAB_BYTES"),
    ):
        assert settings(manifests, CONFIG_MAPS[name])[key] == default_of(services[name]["environment"][key])


@pytest.mark.parametrize("name", [each for each in OVERLAYS if each != "cpu"])
def test_pods_of_nodes_with_gpus_may_run_there_and_have_images_for_them(name: str) -> None:
    """The images are those that the guide builds: of compose.gpu.yaml."""
    for pod in pod_templates(overlay(name)):
        if "nodeSelector" in pod.spec:
            assert [each["key"] for each in pod.spec["tolerations"]] == ["nvidia.com/gpu"], pod.name
            for container in pod.containers:
                assert container["image"].partition(":")[0].endswith("-cuda"), container["image"]


# ---- custom resources ----------------------------------------------------------------------------
def test_custom_resources_have_known_fields(own_layouts: dict[str, list[Manifest]]) -> None:
    found: dict[str, list[Manifest]] = {kind: [] for kind in CUSTOM.values()}
    for manifests in (*map(overlay, OVERLAYS), *own_layouts.values()):
        for each in manifests:
            if each["apiVersion"] in CUSTOM:
                assert each["kind"] == CUSTOM[each["apiVersion"]]
                found[each["kind"]].append(each)
    for each in found["ScaledObject"]:
        spec = each["spec"]
        assert set(spec) <= {
            "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod",
            "advanced", "triggers",
        }  # fmt: skip
        for trigger in spec["triggers"]:
            assert set(trigger) == {"type", "metricType", "metadata"}
            assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
            assert {"serverAddress", "query", "threshold"} <= set(trigger["metadata"])
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
    for each in found["InferencePool"]:
        assert set(each["spec"]) == {"selector", "targetPorts", "endpointPickerRef"}
        assert set(each["spec"]["endpointPickerRef"]) == {"name", "port", "failureMode"}
    for each in found["HTTPRoute"]:
        assert set(each["spec"]) == {"parentRefs", "rules"}
        for rule in each["spec"]["rules"]:
            assert {"backendRefs"} <= set(rule) <= {"backendRefs", "matches", "timeouts"}
    for each in found["PodMonitor"]:
        assert set(each["spec"]) == {"selector", "podMetricsEndpoints"}
    assert all(found.values()), "each kind is used"


@pytest.mark.parametrize("name", ["keda", EVERYTHING])
def test_scalers_target_deployments_and_read_what_waits(
    name: str, own_layouts: dict[str, list[Manifest]]
) -> None:
    manifests = own_layouts.get(name) or overlay(name)
    engines = {pod.name for pod in pod_templates(manifests) if "llm-d.ai/role" in pod.labels}
    scaled = list(of_kind(manifests, "ScaledObject"))
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == engines
    assert {each["metadata"]["name"] for each in scaled} == engines
    for each in scaled:
        deployment = named(manifests, "Deployment", each["spec"]["scaleTargetRef"]["name"])
        assert "replicas" not in deployment["spec"], "the autoscaler owns the number"
        assert each["spec"]["minReplicaCount"] == (0 if each["metadata"]["name"] == "encoder" else 1)
        series = {
            read.name
            for trigger in each["spec"]["triggers"]
            for read in selectors(trigger["metadata"]["query"])
        }
        signals = {each for each in series if each.endswith("_seconds_waiting")}
        assert signals
        assert series - signals <= {"vllm:kv_cache_usage_perc", "up"}, "never a stream's lag"
        assert all(f"`{each}`" in PAGE for each in series - signals - {"up"})


def test_a_gateway_waits_longer_for_an_encoder_than_it_starts() -> None:
    data = settings(overlay("keda"), "gateway")
    grace_s = float(data["TRIPTYCH_ENCODER_GRACE_S"])
    assert data["TRIPTYCH_ENCODERS_ON_DEMAND"] == "true"
    assert grace_s >= 120
    assert float(data["TRIPTYCH_FIRST_TOKEN_TIMEOUT_S"]) >= grace_s


def test_the_pool_has_language_models_alone() -> None:
    manifests = overlay("inference-extension")
    (pool,) = of_kind(manifests, "InferencePool")
    selected = [
        pod
        for pod in pod_templates(manifests)
        if pool["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
    ]
    assert [pod.name for pod in selected] == ["prefill-decode"]
    ports = {each["containerPort"] for each in selected[0].main["ports"]}
    assert {each["number"] for each in pool["spec"]["targetPorts"]} == ports
    callers = named(manifests, "HTTPRoute", "triptych")["spec"]
    (service,) = callers["rules"][0]["backendRefs"]
    assert service == {"name": "gateway", "port": 8000}
    assert "matches" not in callers["rules"][0], "all paths"


def test_pods_are_scraped_as_the_jobs_of_the_alerts(own_layouts: dict[str, list[Manifest]]) -> None:
    for manifests in (overlay("observability"), own_layouts[EVERYTHING]):
        (monitor,) = of_kind(manifests, "PodMonitor")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"] is True, "`namespace` is a label of our own series"
        keep, *jobs = endpoint["relabelings"]
        for pod in pod_templates(manifests):
            if pod.name == "redis":
                continue
            labels = {
                f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9]', '_', key)}": value
                for key, value in pod.labels.items()
            }
            job = ""
            for step in jobs:
                value = labels.get(step["sourceLabels"][0], "")
                found = re.fullmatch(step.get("regex", "(.*)"), value)
                job = step["replacement"].replace("$1", found[1]) if found else job
            wanted = (
                pod.name if pod.name in ("prefill", "decode") else pod.labels["app.kubernetes.io/component"]
            )
            assert job == f"triptych-{wanted}"
            scraped = [
                each["name"] for each in pod.main["ports"] if re.fullmatch(keep["regex"], each["name"])
            ]
            assert len(scraped) == 1, pod.name
        assert any(
            each["metadata"]["name"] == "triptych-dashboard" for each in of_kind(manifests, "ConfigMap")
        )


def test_alerts_are_a_resource_of_the_operator_when_indented() -> None:
    """The command of the guide makes the alerts' rules."""
    (head,) = re.findall(r"^\{ cat <<'E'\n(.*?)^E$", GUIDE, re.MULTILINE | re.DOTALL)
    made: dict[str, Any] = yaml.safe_load(
        head + "".join(f"  {line}\n" for line in ALERTS.read_text().splitlines())
    )
    assert (made["apiVersion"], made["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert made["spec"] == yaml.safe_load(ALERTS.read_text())


# ---- the guide -----------------------------------------------------------------------------------
def test_the_guide_names_every_overlay_and_component() -> None:
    components = {folder.name for folder in (KUBERNETES / "components").iterdir()} - {"pods"}
    for name in (*OVERLAYS, *components, *(folder.name for folder in (KUBERNETES / "roles").iterdir())):
        assert f"`{name}`" in GUIDE, name


def test_commands_of_the_guide_name_what_there_is() -> None:
    for path in re.findall(r"deploy/[\w./-]+\w", GUIDE):
        assert (ROOT / path).exists(), path
    names = {(each["kind"], each["metadata"]["name"]) for overlay_ in OVERLAYS for each in overlay(overlay_)}
    kinds = {
        "deployment": "Deployment",
        "daemonset": "DaemonSet",
        "statefulset": "StatefulSet",
        "service": "Service",
    }
    for kind, name in re.findall(r"\b(deployment|daemonset|statefulset|service)/([\w-]+)", GUIDE):
        assert (kinds[kind], name) in names
