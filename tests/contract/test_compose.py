"""compose.yaml leaves every service time to end; compose.gpu.yaml has what `cuda_ipc` needs."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from triptych_cache_store.settings import StoreSettings
from triptych_cli.system.engines import CPU_ENGINE_ENV
from triptych_common.cores.gpu_plan import ENCODER_SHARE, SLAB_SHARE, SMALLEST_SLAB_BYTES, memory_shares
from triptych_common.runtime import ServiceSettings
from triptych_encoder.settings import EncoderSettings
from triptych_fabric.settings import FabricSettings
from triptych_gateway.settings import GatewaySettings
from triptych_prefill_decode.settings import PrefillDecodeSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "compose.yaml"
COMPOSE_GPU = ROOT / "compose.gpu.yaml"
COMPOSE_EPD = ROOT / "compose.epd.yaml"
COMPOSE_HOST = ROOT / "compose.host.yaml"
ENV_FILES = ROOT / "deploy" / "compose"
ENGINES = ("encoder", "prefill_decode")
ON_GPU = ("cache_store", *ENGINES)
SMALLEST_GPU_BYTES = 24 << 30


def default_of(value: str) -> str:
    """Of an interpolation: NAME may be unset."""
    found = re.fullmatch(r"\$\{(\w+):-(.*)\}", value)
    assert found is not None, value
    return found[2]


@pytest.fixture(scope="module")
def gpu_services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = loaded(COMPOSE_GPU)["services"]
    return services


class ComposeLoader(yaml.SafeLoader):
    """Reads values behind Compose's own tags as if the tags were not there."""


def _overridden(loader: ComposeLoader, node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_yaml_null(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_mapping(node, deep=True)


ComposeLoader.add_constructor("!override", _overridden)
ComposeLoader.add_constructor("!reset", _overridden)


def loaded(file: Path) -> dict[str, Any]:
    """Content of a Compose file; a variable that it removes from another one's is None."""
    content: dict[str, Any] = yaml.load(file.read_text(), ComposeLoader)  # noqa: S506 -- a safe loader
    return content


def test_prefill_and_decode_are_the_prefill_decode_with_other_roles() -> None:
    services = loaded(COMPOSE_EPD)["services"]
    assert services["prefill_decode"] == {"profiles": ["prefill_decode"]}, "it is not started"
    for name in ("prefill", "decode"):
        assert services[name]["extends"] == {"file": "compose.yaml", "service": "prefill_decode"}
        role = services[name]["environment"]["TRIPTYCH_ROLE"]
        assert role == name
        assert services[name]["labels"] == {"llm-d.ai/role": name}
        PrefillDecodeSettings(model="m", role=role)
    base = yaml.safe_load(COMPOSE.read_text())["services"]["gateway"]["depends_on"]
    needed = {*base, "prefill", "decode"} - {"prefill_decode"}
    assert set(services["gateway"]["depends_on"]) == needed


def test_what_torch_compiles_outlives_the_container() -> None:
    for name in ENGINES:
        service = yaml.safe_load(COMPOSE.read_text())["services"][name]
        folder = service["environment"]["TORCHINDUCTOR_CACHE_DIR"]
        kept = {
            each.partition(":")[2]: each.partition(":")[0]
            for each in service["volumes"]
            if isinstance(each, str)
        }
        (volume,) = [kept[target] for target in kept if folder.startswith(f"{target}/")]
        assert volume == "engine-cache"


def test_no_service_is_killed_while_it_drains() -> None:
    text = COMPOSE.read_text()
    bound = re.search(r"TRIPTYCH_DRAIN_TIMEOUT_S: \$\{TRIPTYCH_DRAIN_TIMEOUT_S:-(\d+)\}", text)
    grace = re.findall(r"stop_grace_period: \$\{TRIPTYCH_STOP_GRACE:-(\d+)s\}", text)
    assert bound is not None
    assert float(bound[1]) == ServiceSettings.model_fields["drain_timeout_s"].default
    assert len(grace) == 2, "the engines, and the gateway"
    assert all(int(seconds) > float(bound[1]) + 10 for seconds in grace)


@pytest.mark.parametrize("name", ON_GPU)
def test_store_and_engines_have_a_gpu_and_see_each_others_processes(
    gpu_services: dict[str, dict[str, Any]], name: str
) -> None:
    """CUDA opens another process's memory by its process id."""
    service = gpu_services[name]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert [default_of(each) for each in device["device_ids"]] == ["0"], "the same one"
    assert service["pid"] == "service:processes"
    assert service["init"] is False, "it would be no process 1"
    assert service["depends_on"]["processes"] == {"condition": "service_started"}
    assert service["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert service["environment"]["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_the_store_has_memory_for_a_cuda_context_beside_the_region(
    gpu_services: dict[str, dict[str, Any]],
) -> None:
    base = yaml.safe_load(COMPOSE.read_text())["services"]["cache_store"]["mem_limit"]
    limit = gpu_services["cache_store"]["mem_limit"]
    assert limit.split(":-")[0] == base.split(":-")[0], "one setting"
    assert int(default_of(limit).removesuffix("g")) > int(default_of(base).removesuffix("g"))


def test_the_store_is_no_client_of_mps_and_has_time_for_its_cuda_context(
    gpu_services: dict[str, dict[str, Any]],
) -> None:
    store = gpu_services["cache_store"]
    assert store["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "/run/triptych/no-mps", (
        "no daemon listens there"
    )
    assert store["healthcheck"] == {"start_period": "120s"}
    assert not any("CUDA_MPS" in name for engine in ENGINES for name in gpu_services[engine]["environment"])


def test_no_service_sees_the_hosts_processes(gpu_services: dict[str, dict[str, Any]]) -> None:
    assert set(gpu_services) == {*ON_GPU, "processes", "store-metrics"}
    assert gpu_services["store-metrics"] == {"image": gpu_services["cache_store"]["image"]}
    base = yaml.safe_load(COMPOSE.read_text())["services"]
    assert "pid" not in {key for each in (*base.values(), gpu_services["processes"]) for key in each}


def test_the_owner_of_the_process_ids_is_as_shut_in_as_the_others(
    gpu_services: dict[str, dict[str, Any]],
) -> None:
    owner = gpu_services["processes"]
    store = yaml.safe_load(COMPOSE.read_text())["services"]["cache_store"]
    assert owner["init"] is True, "it takes in the processes that others leave behind"
    for key in ("restart", "read_only", "cap_drop", "security_opt", "network_mode", "logging"):
        assert owner[key] == store[key], key


@pytest.mark.parametrize("name", ENGINES)
def test_engines_on_a_gpu_inherit_no_setting_of_those_on_a_cpu(
    gpu_services: dict[str, dict[str, Any]], name: str
) -> None:
    own, base = (
        services[name]["environment"]
        for services in (gpu_services, yaml.safe_load(COMPOSE.read_text())["services"])
    )
    for key, on_cpu in CPU_ENGINE_ENV.items():
        assert on_cpu == (default_of(base[key]) if base[key].startswith("${") else base[key]), key
        assert key in own, f"{key} is inherited"
        assert own[key] is None or default_of(own[key]) != on_cpu, key
    assert default_of(own["OMP_NUM_THREADS"]) == "4"
    assert default_of(own["VLLM_ENABLE_V1_MULTIPROCESSING"]) == "1"
    assert base["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_images_for_gpus_have_names_and_packages_of_their_own(
    gpu_services: dict[str, dict[str, Any]],
) -> None:
    base = yaml.safe_load(COMPOSE.read_text())["services"]
    for name in ON_GPU:
        assert gpu_services[name]["image"] != base[name]["image"]
    for name in ("cache_store", "encoder"):  # prefill_decode has the encoder's image
        assert gpu_services[name]["build"]["args"] == {"ENGINE": "cuda"}
    recipe = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    assert 'cache_store[uvloop$([ "$ENGINE" != cuda ] || echo ,cuda)]' in recipe
    extras = tomllib.loads((ROOT / "services" / "cache_store" / "pyproject.toml").read_text())["project"]
    (needed,) = extras["optional-dependencies"]["cuda"]
    assert needed.startswith("triptych-common[cuda]==")


def test_the_gpus_memory_is_enough_for_all_of_them(gpu_services: dict[str, dict[str, Any]]) -> None:
    slab_bytes = int(default_of(gpu_services["cache_store"]["environment"]["TRIPTYCH_SLAB_BYTES"]))
    assert slab_bytes == SMALLEST_SLAB_BYTES
    assert slab_bytes <= SLAB_SHARE * SMALLEST_GPU_BYTES, "it is counted"
    shares = []
    for name in ENGINES:
        (option,) = json.loads(default_of(gpu_services[name]["environment"]["TRIPTYCH_ENGINE_ARGS"]))
        assert option.startswith("--gpu-memory-utilization=")
        shares.append(float(option.partition("=")[2]))
    assert shares == memory_shares(ENGINES, SLAB_SHARE), "as the launcher has it"
    assert shares[0] == ENCODER_SHARE
    assert sum(shares) + slab_bytes / SMALLEST_GPU_BYTES < 0.9


def test_whatever_can_be_set_is_in_the_document() -> None:
    document = (ROOT / "docs" / "guide" / "docker.md").read_text()
    for file in (COMPOSE, COMPOSE_GPU, COMPOSE_EPD, COMPOSE_HOST, *ENV_FILES.glob("*.env")):
        for name in set(re.findall(r"\$\{(TRIPTYCH_\w+)", file.read_text())):
            assert f"`{name}`" in document or f"{name}=" in document, f"{name} of {file.name}"


OURS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "encoder": EncoderSettings,
    "prefill_decode": PrefillDecodeSettings,
    "cache_store": StoreSettings,
}
SETTINGS = OURS | {"fabric": FabricSettings}
"""With what compose.host.yaml alone has."""

COMPOSES_OWN = {
    "TRIPTYCH_CONFIG", "TRIPTYCH_REDIS_URL", "TRIPTYCH_INSTANCE", "TRIPTYCH_MODEL", "TRIPTYCH_HOST",
    "TRIPTYCH_PORT", "TRIPTYCH_METRICS_HOST", "TRIPTYCH_METRICS_PORT", "TRIPTYCH_METRICS_SOCKET",
    "TRIPTYCH_KEEP_REGION", "TRIPTYCH_FABRIC_LISTEN_HOST", "TRIPTYCH_FABRIC_ADVERTISE_HOST",
    "TRIPTYCH_FABRIC_PORT", "TRIPTYCH_FABRIC_KEY_FILE",
}  # fmt: skip
"""Where services find each other. Everything else can be set without a change of compose.yaml."""

THE_IMAGES = {"TRIPTYCH_RUN_DIR", "TRIPTYCH_STORE_SOCKET", "TRIPTYCH_TRACES_DIR", "TRIPTYCH_PRINT_CONFIG"}
"""Paths in the container, and what ends a service: not taken from a shell."""


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_reaches_its_service(name: str, host_services: dict[str, dict[str, Any]]) -> None:
    """By a file of variables or of settings; or by a variable of Compose's own, which wins over both."""
    service = (yaml.safe_load(COMPOSE.read_text())["services"] | {"fabric": host_services["fabric"]})[name]
    assert service["env_file"] == [
        {"path": f"deploy/compose/{name}.env", "required": True},
        {"path": "${TRIPTYCH_ENV_FILE:-triptych.env}", "required": False},
    ]
    lines = (ENV_FILES / f"{name}.env").read_text().splitlines()[1:]
    handed_on = [line.partition("=")[0] for line in lines]
    assert set(handed_on) == _settings(name) - COMPOSES_OWN - THE_IMAGES
    assert len(handed_on) == len(set(handed_on))
    assert service["environment"]["TRIPTYCH_CONFIG"].startswith("${TRIPTYCH_CONFIG_FILE:+")
    (mounted,) = [
        each for each in service["volumes"] if isinstance(each, dict) and "triptych.yaml" in each["target"]
    ]
    assert mounted["source"] == "${TRIPTYCH_CONFIG_FILE:-/dev/null}"
    assert mounted["read_only"] is True
    given = {key: value for key, value in service["environment"].items() if key.startswith("TRIPTYCH_")}
    known = {f"TRIPTYCH_{field}".upper() for field in SETTINGS[name].model_fields}
    fixed = {key for key, value in given.items() if not value.startswith("${")} & known
    assert fixed <= COMPOSES_OWN


@pytest.mark.parametrize("file", [COMPOSE, COMPOSE_GPU], ids=lambda file: file.name)
def test_no_empty_variable_hides_the_value_of_a_file(file: Path) -> None:
    """`environment` wins over files, and services ignore what is empty: so keys would be lost."""
    for name, service in loaded(file)["services"].items():
        if name not in OURS:
            continue
        given = {
            key: value for key, value in service.get("environment", {}).items() if key in _settings(name)
        }
        given.pop("TRIPTYCH_CONFIG", None)  # a path in the container, where TRIPTYCH_CONFIG_FILE is mounted
        for key, value in given.items():
            assert value, f"{key} of {name}: Compose removes a null, though a file has a value"
            assert not value.startswith("${") or default_of(value), f"{key} of {name} may be empty"


def _settings(name: str) -> set[str]:
    others = {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"}
    return others | {f"TRIPTYCH_{field}".upper() for field in SETTINGS[name].model_fields}


def config(folder: Path, **shell: str) -> dict[str, dict[str, str | None]]:
    """The services' environments, as Compose makes them. Needs no engine."""
    services = services_of(folder, **shell)
    return {name: services[name]["environment"] for name in OURS}


def services_of(folder: Path, *options: str, **shell: str) -> dict[str, dict[str, Any]]:
    """The services as Compose makes them. Needs no engine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRIPTYCH_", "OTEL_"))}
    done = subprocess.run(
        ["docker", "compose", *options, "config", "--format", "json"],
        cwd=folder, env=kept | shell, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    services: dict[str, dict[str, Any]] = json.loads(done.stdout)["services"]
    return services


@pytest.fixture(scope="module")
def host_services() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = loaded(COMPOSE_HOST)["services"]
    return services


class TestSeveralHosts:
    def test_services_are_those_of_one_host_and_the_agent(
        self, host_services: dict[str, dict[str, Any]]
    ) -> None:
        assert set(host_services) == {"redis", "gateway", "cache_store", "fabric", *ENGINES}
        for name, service in host_services.items():
            if name != "fabric":
                assert service["extends"] == {"file": "compose.yaml", "service": name}
        first = {name for name, service in host_services.items() if service.get("profiles") == ["first"]}
        assert first == {"redis", "gateway"}, "other hosts have neither"

    def test_names_are_unique_in_the_system(self, host_services: dict[str, dict[str, Any]]) -> None:
        names = {
            name: each["environment"]["TRIPTYCH_INSTANCE"]
            for name, each in host_services.items()
            if name != "redis"
        }
        assert names["cache_store"] == "store-${TRIPTYCH_HOST_NAME}"
        assert names["fabric"] == "fabric-${TRIPTYCH_HOST_NAME}"
        assert all("${TRIPTYCH_HOST_NAME}" in each for each in names.values())
        for name in (*ENGINES, "gateway"):
            assert names[name].endswith("-{hostname}"), "replicas"

    def test_every_port_for_other_hosts_is_published_at_one_address(
        self, host_services: dict[str, dict[str, Any]]
    ) -> None:
        ports = [port for service in host_services.values() for port in service.get("ports", ())]
        assert len(ports) == 4
        assert all(
            port.startswith(("${TRIPTYCH_HOST_ADDRESS}:", "${TRIPTYCH_HOST_ADDRESS:?")) for port in ports
        )

    def test_nothing_is_let_in_without_a_secret(self, host_services: dict[str, dict[str, Any]]) -> None:
        redis, agent = host_services["redis"], host_services["fabric"]
        assert '"$${REDIS_PASSWORD:?' in redis["command"][0], "it does not start without"
        assert "requirepass" in redis["command"][0]
        assert agent["environment"]["TRIPTYCH_FABRIC_KEY_FILE"] == "/run/secrets/fabric_key"
        assert agent["secrets"] == ["fabric_key"]
        having = {name for name, service in host_services.items() if "secrets" in service}
        assert having == {"fabric"}

    def test_the_agent_is_as_confined_as_other_services(
        self, host_services: dict[str, dict[str, Any]]
    ) -> None:
        base = yaml.safe_load(COMPOSE.read_text())["services"]["gateway"]
        for key in ("restart", "init", "read_only", "cap_drop", "security_opt", "logging"):
            assert host_services["fabric"][key] == base[key]
        assert host_services["fabric"]["stop_grace_period"] == base["stop_grace_period"], "it drains, too"
        assert host_services["fabric"]["healthcheck"]["test"][-1] == "triptych_fabric"

    def test_the_agent_has_what_every_other_service_has(
        self, host_services: dict[str, dict[str, Any]]
    ) -> None:
        """Else it registers in another deployment, or logs and traces in another way than they do."""
        base = yaml.safe_load(COMPOSE.read_text())["services"]
        shared = set.intersection(*(set(base[name]["environment"]) for name in OURS))
        agent = host_services["fabric"]["environment"]
        assert shared <= set(agent)
        ours = {name: base["gateway"]["environment"][name] for name in shared}
        its_own = {"TRIPTYCH_REDIS_URL", "TRIPTYCH_INSTANCE"}
        assert {key: agent[key] for key in shared - its_own} == {key: ours[key] for key in shared - its_own}
        files = [set((ENV_FILES / f"{name}.env").read_text().split("\n")[1:]) for name in OURS]
        assert set.intersection(*files) <= set((ENV_FILES / "fabric.env").read_text().split("\n"))

    def test_volumes_are_those_of_one_host(self) -> None:
        volumes = yaml.load(COMPOSE_HOST.read_text(), ComposeLoader)["volumes"]  # noqa: S506
        base = yaml.safe_load(COMPOSE.read_text())["volumes"]
        assert volumes == {name: base[name] for name in ("run", "traces", "engine-cache")}

    def test_compose_takes_it(self, project: Path) -> None:
        host = {
            "TRIPTYCH_HOST_NAME": "b",
            "TRIPTYCH_HOST_ADDRESS": "192.0.2.2",
            "TRIPTYCH_REDIS_HOST": "192.0.2.1",
            "TRIPTYCH_REDIS_PASSWORD": "secret",
        }
        shutil.copy(COMPOSE_HOST, project)
        made = services_of(project, "-f", COMPOSE_HOST.name, **host)
        assert set(made) == {"cache_store", "fabric", *ENGINES}
        for name, service in made.items():
            assert service["environment"]["TRIPTYCH_REDIS_URL"] == "redis://:secret@192.0.2.1:6379/0", name
            assert set(service.get("networks") or {}) == (set() if name == "cache_store" else {"hosts"})
            assert "redis" not in service.get("depends_on", {})
        (project / ".env").write_text("TRIPTYCH_DEPLOYMENT=prod\nTRIPTYCH_FABRIC_MAX_RATE=1e6\n")
        made = services_of(project, "-f", COMPOSE_HOST.name, **host)
        assert {each["environment"]["TRIPTYCH_DEPLOYMENT"] for each in made.values()} == {"prod"}
        assert made["fabric"]["environment"]["TRIPTYCH_FABRIC_MAX_RATE"] == "1e6"
        first = services_of(project, "-f", COMPOSE_HOST.name, "--profile", "first", **host)
        assert set(first) == set(made) | {"redis", "gateway"}
        assert set(first["redis"]["networks"]) == {"hosts"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with all that `docker compose config` reads."""
    if (
        shutil.which("docker") is None
        or subprocess.run(
            ["docker", "compose", "version"], capture_output=True, timeout=30, check=False
        ).returncode
    ):
        pytest.skip("no docker command with Compose here")
    shutil.copy(COMPOSE, tmp_path)
    shutil.copytree(ENV_FILES, tmp_path / "deploy" / "compose")
    return tmp_path


def test_values_of_both_files_and_of_the_shell_arrive(project: Path) -> None:
    (project / ".env").write_text(
        'TRIPTYCH_API_KEYS=["of .env"]\nTRIPTYCH_FETCH_URLS=false\nTRIPTYCH_MAX_ITEMS=7\n'
        'TRIPTYCH_ENCODER_ARGS=["--a=b"]\nTRIPTYCH_GRAFANA_PASSWORD=secret\n'
    )
    made = config(project)
    assert made["gateway"]["TRIPTYCH_API_KEYS"] == '["of .env"]'
    assert made["gateway"]["TRIPTYCH_FETCH_URLS"] == "false"
    assert made["gateway"]["TRIPTYCH_MAX_ITEMS"] == "7"
    assert made["encoder"]["TRIPTYCH_ENGINE_ARGS"] == '["--a=b"]'
    assert not made["prefill_decode"]["TRIPTYCH_ENGINE_ARGS"]
    assert not any("TRIPTYCH_GRAFANA_PASSWORD" in each for each in made.values())
    assert "TRIPTYCH_API_KEYS" not in made["encoder"]

    shell = {
        "TRIPTYCH_API_KEYS": '["of the shell"]',
        "TRIPTYCH_LOG_LEVEL": "DEBUG",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318",
    }
    made = config(project, **shell)
    assert made["gateway"]["TRIPTYCH_API_KEYS"] == '["of the shell"]'
    for each in made.values():
        assert each["TRIPTYCH_LOG_LEVEL"] == "DEBUG"
        assert each["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://x:4318"

    (project / "triptych.env").write_text(
        'TRIPTYCH_API_KEYS=["of triptych.env"]\nTRIPTYCH_API_KEYS_FILE=/keys\nTRIPTYCH_CORE_POLICY=even\n'
        'TRIPTYCH_FETCH_ALLOWED_HOSTS=["a"]\nTRIPTYCH_ENGINE_ARGS=["--c"]\nOTEL_EXPORTER_OTLP_ENDPOINT=y\n'
    )
    for made in (config(project, **shell), config(project, TRIPTYCH_API_KEYS="")):
        assert made["gateway"]["TRIPTYCH_API_KEYS"] == '["of triptych.env"]'
        assert made["gateway"]["TRIPTYCH_API_KEYS_FILE"] == "/keys"
        assert made["gateway"]["TRIPTYCH_FETCH_ALLOWED_HOSTS"] == '["a"]'
        assert made["encoder"]["TRIPTYCH_ENGINE_ARGS"] == '["--c"]'
        assert made["prefill_decode"]["TRIPTYCH_CORE_POLICY"] == "even"
        assert made["cache_store"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "y"
