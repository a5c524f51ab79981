"""Which services, with which environment, in which order."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from triptych_cli.roles import RoleCounts
from triptych_cli.supervisor.daemon import STOP_LIMIT_S
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import HostPlan, ResolvedOptions
from triptych_cli.system.topology import HttpReady, RedisAnswers, Registered, ServiceSpec, Topology, plan
from triptych_common.runtime import ServiceSettings

LAYOUT = RunLayout(Path("/run/t"), Path("/state/t"))
OPTIONS = ResolvedOptions(model="/models/m", model_is_local=True, gateway_port=8000)


def planned(options: ResolvedOptions = OPTIONS) -> Topology:
    ports = range(9000, 9000 + len(options.counts.language_models()))
    return plan(
        options,
        LAYOUT,
        prefill_decode_ports=ports,
        metrics_ports=range(7000, 7001 + options.counts.encoders + (options.host is not None)),
        kv_ports=range(6000, 6000 + options.counts.num_handing_over),
        gateway_ports=range(5000, 5000 + options.num_gateways),
        python="python",
        redis_server="redis-server",
        redis_password=None if options.host is None else "secret",
    )


def by_name(topology: Topology) -> dict[str, ServiceSpec]:
    return {service.name: service for service in topology.services}


@pytest.mark.parametrize(
    ("local_encode", "tower", "decision"),
    [
        (None, None, None),
        ("off", "never", "remote"),
        ("fallback", "fallback", "remote"),
        ("auto", "fallback", "auto"),
    ],
)
def test_local_encode_is_for_instances_and_gateways(
    local_encode: Any, tower: str | None, decision: str | None
) -> None:
    services = by_name(planned(replace(OPTIONS, local_encode=local_encode)))
    assert services["prefill_decode-0"].env.get("TRIPTYCH_LOCAL_ENCODE") == tower
    assert services["gateway-0"].env.get("TRIPTYCH_ENCODE_DECISION") == decision
    assert "TRIPTYCH_LOCAL_ENCODE" not in services["encoder-0"].env


def test_each_service_answers_prometheus_on_a_local_port_of_its_own() -> None:
    services = by_name(planned(replace(OPTIONS, counts=RoleCounts(2, 1), num_gateways=2)))
    ports = {name: spec.metrics_port for name, spec in services.items() if name != "redis"}
    assert ports == {
        "cache_store-0": 7000,
        "encoder-0": 7001,
        "encoder-1": 7002,
        "prefill_decode-0": 9000,  # where vLLM listens
        "gateway-0": 8000,
        "gateway-1": 8001,
    }
    for name in ("cache_store-0", "encoder-0", "encoder-1"):
        env = services[name].env
        assert env["TRIPTYCH_METRICS_HOST"] == "127.0.0.1"
        assert env["TRIPTYCH_METRICS_PORT"] == str(ports[name])
    assert services["redis"].metrics_port is None


def test_every_service_comes_after_what_it_needs() -> None:
    topology = planned(replace(OPTIONS, counts=RoleCounts(2, 3)))
    seen: set[str] = set()
    for service in topology.services:
        assert service.after | service.starts_after <= seen
        seen.add(service.name)
    gateway = topology.services[-1]
    assert gateway.after == seen - {"gateway-0"}


def test_dependents_stop_before_what_they_depend_on() -> None:
    waves = [[service.name for service in wave] for wave in planned().stop_waves()]
    assert waves == [["gateway-0"], ["encoder-0", "prefill_decode-0"], ["cache_store-0"], ["redis"]]


def test_an_existing_redis_replaces_the_embedded_one() -> None:
    services = by_name(planned(replace(OPTIONS, redis_url="redis://there:6379/0")))
    assert "redis" not in services
    assert services["cache_store-0"].after == frozenset()
    assert services["encoder-0"].env["TRIPTYCH_REDIS_URL"] == "redis://there:6379/0"
    ready = services["encoder-0"].ready
    assert isinstance(ready, Registered)
    assert ready.redis_url == "redis://there:6379/0"


def test_the_embedded_redis_listens_on_its_private_socket_alone() -> None:
    redis = by_name(planned())["redis"]
    arguments = dict(zip(redis.argv[1::2], redis.argv[2::2], strict=True))
    assert arguments["--port"] == "0"
    assert arguments["--unixsocketperm"] == "600"
    assert arguments["--unixsocket"] == "/run/t/redis.sock"
    assert arguments["--maxmemory-policy"] == "noeviction"
    assert arguments["--save"] == ""
    assert redis.ready == RedisAnswers("unix:///run/t/redis.sock")


def test_instances_have_names_ports_and_options_of_their_own() -> None:
    services = by_name(
        planned(
            replace(
                OPTIONS,
                counts=RoleCounts(2, 2),
                encoder_args=("--dtype", "float32"),
                prefill_decode_args=("--max-model-len", "2048"),
            )
        )
    )
    assert services["encoder-1"].env["TRIPTYCH_INSTANCE"] == "encoder-1"
    assert json.loads(services["encoder-1"].env["TRIPTYCH_ENGINE_ARGS"]) == ["--dtype", "float32"]
    assert [services[f"prefill_decode-{n}"].env["TRIPTYCH_PORT"] for n in (0, 1)] == ["9000", "9001"]
    assert json.loads(services["prefill_decode-0"].env["TRIPTYCH_ENGINE_ARGS"]) == ["--max-model-len", "2048"]


@pytest.mark.parametrize(
    ("listens_on", "reached_at"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.7", "10.0.0.7"), ("::1", "[::1]")]
)
def test_the_gateway_listens_where_it_is_told_and_is_asked_where_this_machine_reaches_it(
    listens_on: str, reached_at: str
) -> None:
    topology = planned(replace(OPTIONS, gateway_host=listens_on))
    gateway = by_name(topology)["gateway-0"]
    assert gateway.env["TRIPTYCH_HOST"] == listens_on
    assert gateway.ready == HttpReady(f"http://{reached_at}:8000/health/ready")
    assert topology.endpoint == f"http://{reached_at}:8000/v1"


def test_cpu_engines_share_the_cores_and_stay_offline_with_a_local_model() -> None:
    services = by_name(planned())
    defaults = services["encoder-0"].env_defaults
    assert defaults["OMP_WAIT_POLICY"] == "passive"
    assert defaults["HF_HUB_OFFLINE"] == "1"
    assert services["cache_store-0"].env_defaults == {}
    remote = by_name(planned(replace(OPTIONS, model="org/model", model_is_local=False)))
    assert "HF_HUB_OFFLINE" not in remote["encoder-0"].env_defaults


@pytest.mark.parametrize("gpus", [(), ("0",)])
def test_what_torch_compiles_outlives_the_system(gpus: tuple[str, ...]) -> None:
    services = by_name(planned(replace(OPTIONS, gpus=gpus)))
    for name in ("encoder-0", "prefill_decode-0"):
        kept = Path(services[name].env_defaults["TORCHINDUCTOR_CACHE_DIR"])
        assert kept == LAYOUT.compiled_dir
        assert not kept.is_relative_to(LAYOUT.run_dir)
        assert kept.is_relative_to(LAYOUT.state_dir)


@pytest.mark.parametrize("gpus", [(), ("0",)])
def test_engine_cores_are_spawned(gpus: tuple[str, ...]) -> None:
    services = by_name(planned(replace(OPTIONS, gpus=gpus)))
    for name in ("encoder-0", "prefill_decode-0"):
        assert services[name].env_defaults["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_engines_own_cores_and_have_a_thread_for_each() -> None:
    services = by_name(planned(replace(OPTIONS, cores=(0, 2, 3, 5), core_policy="image_first")))
    for name, own in (("encoder-0", [0, 2]), ("prefill_decode-0", [3, 5])):
        env = services[name].env
        assert json.loads(env["TRIPTYCH_CORES"]) == own
        assert env["OMP_NUM_THREADS"] == "2"
        assert env["TRIPTYCH_CORE_POLICY"] == "image_first"
    assert json.loads(services["encoder-0"].env["TRIPTYCH_OTHER_CORES"]) == [3, 5]
    assert "TRIPTYCH_OTHER_CORES" not in services["prefill_decode-0"].env
    assert "TRIPTYCH_CORES" not in services["gateway-0"].env


def test_engines_that_own_the_same_core_do_not_keep_off_it() -> None:
    services = by_name(planned(replace(OPTIONS, cores=(4,), core_policy="text_first")))
    assert json.loads(services["encoder-0"].env["TRIPTYCH_CORES"]) == [4]
    assert json.loads(services["encoder-0"].env["TRIPTYCH_OTHER_CORES"]) == []


def test_threads_that_the_user_wants_are_left_alone() -> None:
    services = by_name(planned(replace(OPTIONS, cores=())))
    for name in ("encoder-0", "prefill_decode-0"):
        assert not {"TRIPTYCH_CORES", "OMP_NUM_THREADS"} & services[name].env.keys()


class TestGpus:
    def test_engines_that_share_a_gpu_share_its_memory_and_start_in_turn(self) -> None:
        services = by_name(planned(replace(OPTIONS, gpus=("0",))))
        for name, share in (("encoder-0", "0.10"), ("prefill_decode-0", "0.75")):
            arguments = json.loads(services[name].env["TRIPTYCH_ENGINE_ARGS"])
            assert arguments == ["--gpu-memory-utilization", share]
            assert services[name].env["CUDA_VISIBLE_DEVICES"] == "0"
            assert "VLLM_CPU_KVCACHE_SPACE" not in services[name].env_defaults
        assert services["prefill_decode-0"].starts_after == {"encoder-0"}

    def test_engines_of_one_gpu_take_turns_at_every_start(self) -> None:
        services = by_name(planned(replace(OPTIONS, gpus=("2", "5"), counts=RoleCounts(2, 1))))
        found = [services[name].gpus for name in ("encoder-0", "encoder-1", "prefill_decode-0", "gateway-0")]
        assert found == [("2",), ("2",), ("5",), ()]

    def test_the_stores_memory_is_counted_on_the_first_gpu(self) -> None:
        options = replace(OPTIONS, gpus=("3", "4"), counts=RoleCounts(1, 2), slab_share=0.1)
        services = by_name(planned(options))
        shares = {
            name: json.loads(services[name].env["TRIPTYCH_ENGINE_ARGS"])[1:]
            for name in ("encoder-0", "prefill_decode-0", "prefill_decode-1")
        }
        assert shares == {"encoder-0": ["0.10"], "prefill_decode-0": [], "prefill_decode-1": ["0.65"]}
        assert [services[name].env["CUDA_VISIBLE_DEVICES"] for name in shares] == ["3", "4", "3"]
        assert services["prefill_decode-0"].starts_after == frozenset(), "it has a GPU of its own"

    def test_engines_are_told_what_mps_shall_do_where_there_is_one(self) -> None:
        options = replace(OPTIONS, gpus=("0",), has_mps=True, core_policy="text_first")
        services = by_name(planned(options))
        for name, priority in (("encoder-0", "1"), ("prefill_decode-0", "0")):
            assert services[name].env_defaults["CUDA_MPS_CLIENT_PRIORITY"] == priority, "the caller's wins"
            assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in services[name].env_defaults
            assert services[name].env["TRIPTYCH_GPU_ENGINES"] == "2"
            assert services[name].env["TRIPTYCH_CORE_POLICY"] == "text_first"
        for others in (replace(options, has_mps=False), replace(options, gpus=("0", "1"))):
            services = by_name(planned(others))
            for each in (services["encoder-0"], services["prefill_decode-0"]):
                assert not any(key.startswith("CUDA_MPS") for key in {**each.env, **each.env_defaults})

    def test_engines_that_start_in_turn_stop_together(self) -> None:
        topology = planned(replace(OPTIONS, gpus=("0",), counts=RoleCounts(1, 2)))
        assert by_name(topology)["prefill_decode-1"].starts_after == {"prefill_decode-0"}
        waves = [{service.name for service in wave} for wave in topology.stop_waves()]
        assert waves[1] == {"encoder-0", "prefill_decode-0", "prefill_decode-1"}

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--gpu-memory-utilization=0.2",),
            ("--gpu-memory-utilization", "0.2"),
            ("--gpu_memory_utilization=0.2",),
            ("--gpu_memory_utilization", "0.2"),
        ],
    )
    def test_the_users_share_wins(self, arguments: tuple[str, ...]) -> None:
        services = by_name(planned(replace(OPTIONS, gpus=("0",), encoder_args=arguments)))
        assert json.loads(services["encoder-0"].env["TRIPTYCH_ENGINE_ARGS"]) == list(arguments)

    @pytest.mark.parametrize(
        "arguments",
        [("--tensor-parallel-size", "2"), ("--tensor_parallel_size=2",), ("-tp", "2"), ("-tp=2",)],
    )
    def test_an_engine_over_several_gpus_shares_each_with_what_else_is_there(
        self, arguments: tuple[str, ...]
    ) -> None:
        services = by_name(planned(replace(OPTIONS, gpus=("0", "1"), prefill_decode_args=arguments)))
        encoder, text = services["encoder-0"], services["prefill_decode-0"]
        assert (encoder.env["CUDA_VISIBLE_DEVICES"], text.env["CUDA_VISIBLE_DEVICES"]) == ("0", "0,1")
        shares = [json.loads(each.env["TRIPTYCH_ENGINE_ARGS"])[-2:] for each in (encoder, text)]
        assert shares == [["--gpu-memory-utilization", "0.10"], ["--gpu-memory-utilization", "0.75"]]
        assert text.starts_after == {"encoder-0"}, "both measure GPU 0"

    def test_the_store_sees_one_gpu_and_no_mps(self) -> None:
        """A client of MPS that never ends would keep engines out after one's fatal fault."""
        options = replace(OPTIONS, gpus=("3", "4"), has_mps=True, slab_bytes=1 << 28, slab_share=0.01)
        store = by_name(planned(options))["cache_store-0"]
        assert store.env["CUDA_VISIBLE_DEVICES"] == "3"
        assert not Path(store.env["CUDA_MPS_PIPE_DIRECTORY"]).exists(), "where no daemon listens"
        assert store.env["TRIPTYCH_SLAB_BYTES"] == str(1 << 28)
        assert store.env["TRIPTYCH_SLAB_DEVICE"] == "0", "among those that it sees"
        on_cpu = by_name(planned())["cache_store-0"].env
        assert not {"CUDA_VISIBLE_DEVICES", "TRIPTYCH_SLAB_BYTES"} & on_cpu.keys()

    @pytest.mark.parametrize(("slab_bytes", "limit_s"), [(0, 30.0), (1 << 28, 120.0)])
    def test_a_store_with_a_slab_has_time_for_its_cuda_context(self, slab_bytes: int, limit_s: float) -> None:
        store = by_name(planned(replace(OPTIONS, gpus=("0",), slab_bytes=slab_bytes)))["cache_store-0"]
        assert store.start_timeout_s == limit_s

    def test_every_service_numbers_gpus_as_nvidia_smi_does(self) -> None:
        for service in planned(replace(OPTIONS, gpus=("0", "1"))).services:
            if service.name != "redis":
                assert service.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_several_gateways_have_ports_of_their_own_and_a_grace_for_the_balancer() -> None:
    services = by_name(planned(replace(OPTIONS, num_gateways=2)))
    assert services["gateway-1"].ready == HttpReady("http://127.0.0.1:8001/health/ready")
    assert services["gateway-1"].env["TRIPTYCH_PORT"] == "8001"
    assert services["gateway-1"].after == services["gateway-0"].after
    assert "TRIPTYCH_DRAIN_GRACE_S" not in services["gateway-0"].env_defaults
    assert by_name(planned())["gateway-0"].env_defaults["TRIPTYCH_DRAIN_GRACE_S"] == "0"


def test_the_store_keeps_its_region_over_a_restart() -> None:
    assert by_name(planned())["cache_store-0"].env["TRIPTYCH_KEEP_REGION"] == "true"


def test_services_may_drain_before_they_are_killed() -> None:
    bound_s = ServiceSettings.model_fields["drain_timeout_s"].default
    for service in planned().services:
        if service.name.startswith(("encoder", "prefill_decode", "gateway")):
            assert service.stop_timeout_s > bound_s


def test_each_role_has_its_engines() -> None:
    counts = RoleCounts(encoders=2, prefills=2, decodes=2, encode_prefills=1, encode_prefill_decodes=1)
    services = by_name(planned(replace(OPTIONS, counts=counts, local_encode="auto")))
    roles = {name: each.env.get("TRIPTYCH_ROLE") for name, each in services.items()}
    assert {name: role for name, role in roles.items() if role is not None} == {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "encode_prefill-0": "encode-prefill",
        "decode-0": "decode",
        "decode-1": "decode",
        "encode_prefill_decode-0": "encode-prefill-decode",
    }
    assert {each.env["TRIPTYCH_LOCAL_ENCODE"] for name, each in services.items() if roles[name]} == {"never"}
    ports = [each.env.get("TRIPTYCH_KV_PORT") for each in services.values()]
    assert [port for port in ports if port] == [str(6000 + number) for number in range(5)]


def test_all_engines_have_cores() -> None:
    counts = RoleCounts(encoders=1, prefills=1, decodes=1)
    services = by_name(planned(replace(OPTIONS, counts=counts, cores=(0, 1))))
    owned = [services[name].env["TRIPTYCH_CORES"] for name in ("encoder-0", "prefill-0", "decode-0")]
    assert owned == ["[0]", "[1]", "[0]"]


class TestSeveralHosts:
    FIRST = replace(OPTIONS, host=HostPlan("a", "192.0.2.1", 7420, Path("/keys/fabric.key"), 6379))
    SECOND = replace(
        OPTIONS,
        host=HostPlan("b", "192.0.2.2", 7420, Path("/keys/fabric.key"), None),
        redis_url="rediss://there/0",
        num_gateways=0,
        serves_alone=False,
    )

    def test_names_hold_the_hosts(self) -> None:
        assert [service.name for service in planned(self.FIRST).services] == [
            "redis", "store-a", "fabric-a", "encoder-a-0", "prefill_decode-a-0", "gateway-a-0",
        ]  # fmt: skip
        for name, service in by_name(planned(self.FIRST)).items():
            if name != "redis":
                assert service.env["TRIPTYCH_INSTANCE"] == name
                assert service.env["TRIPTYCH_HOST_NAME"] == "a"

    def test_a_host_that_joins_has_no_redis_and_no_gateway(self) -> None:
        topology = planned(self.SECOND)
        names = [service.name for service in topology.services]
        assert names == ["store-b", "fabric-b", "encoder-b-0", "prefill_decode-b-0"]
        assert {each.env["TRIPTYCH_REDIS_URL"] for each in topology.services} == {"rediss://there/0"}
        assert topology.endpoint == ""

    def test_the_agent_starts_after_its_store_and_ends_before_it(self) -> None:
        waves = [{service.name for service in wave} for wave in planned(self.FIRST).stop_waves()]
        assert waves == [
            {"gateway-a-0"}, {"encoder-a-0", "prefill_decode-a-0"}, {"fabric-a"}, {"store-a"}, {"redis"},
        ]  # fmt: skip
        assert by_name(planned(self.FIRST))["fabric-a"].after == {"store-a", "redis"}

    @pytest.mark.parametrize(
        "options", [FIRST, replace(OPTIONS, gpus=("0",), counts=RoleCounts(3, 3))], ids=["hosts", "gpu"]
    )
    def test_all_waves_have_ended_before_the_supervisor_would_be_killed(
        self, options: ResolvedOptions
    ) -> None:
        waves = planned(options).stop_waves()
        assert sum(max(service.stop_timeout_s for service in wave) for wave in waves) < STOP_LIMIT_S

    def test_the_agent(self) -> None:
        agent = by_name(planned(self.FIRST))["fabric-a"]
        assert agent.argv == ("python", "-m", "triptych_fabric")
        assert agent.env["TRIPTYCH_FABRIC_LISTEN_HOST"] == "192.0.2.1"
        assert agent.env["TRIPTYCH_FABRIC_ADVERTISE_HOST"] == "192.0.2.1"
        assert agent.env["TRIPTYCH_FABRIC_PORT"] == "7420"
        assert agent.env["TRIPTYCH_METRICS_HOST"] == "127.0.0.1"
        assert agent.env["TRIPTYCH_METRICS_PORT"] == "7002" == str(agent.metrics_port)
        assert isinstance(agent.ready, Registered)
        assert agent.ready.instance == "fabric-a"

    def test_only_the_agent_is_told_the_key(self) -> None:
        having = [
            each.name for each in planned(self.FIRST).services if "TRIPTYCH_FABRIC_KEY_FILE" in each.env
        ]
        assert having == ["fabric-a"]

    def test_redis_has_a_password_before_it_listens_beyond_its_socket(self) -> None:
        redis = by_name(planned(self.FIRST))["redis"]
        arguments = dict(zip(redis.argv[2::2], redis.argv[3::2], strict=True))
        assert redis.argv[1] == "/run/t/redis.conf", "which holds the password"
        assert (arguments["--bind"], arguments["--port"]) == ("192.0.2.1", "6379")
        assert not [each for each in redis.argv if "secret" in each]
        assert planned(self.FIRST).redis_url == "unix://:secret@/run/t/redis.sock"
        for service in planned(self.FIRST).services[1:]:
            assert service.env["TRIPTYCH_REDIS_URL"] == "unix://:secret@/run/t/redis.sock"

    def test_what_other_hosts_call_listens_on_the_address_and_callers_on_loopback(self) -> None:
        services = by_name(planned(self.FIRST))
        engine, gateway = services["prefill_decode-a-0"], services["gateway-a-0"]
        assert (engine.env["TRIPTYCH_HOST"], engine.env["TRIPTYCH_PORT"]) == ("192.0.2.1", "9000")
        assert (gateway.env["TRIPTYCH_HOST"], gateway.env["TRIPTYCH_PORT"]) == ("127.0.0.1", "8000")
        assert gateway.env["TRIPTYCH_INTERNAL_HOST"] == "192.0.2.1"
        assert gateway.env["TRIPTYCH_INTERNAL_PORT"] == "5000"
        scraped = {name: (each.metrics_host, each.metrics_port) for name, each in services.items()}
        assert scraped["prefill_decode-a-0"] == ("192.0.2.1", 9000)
        assert scraped["gateway-a-0"] == ("192.0.2.1", 5000)
        assert scraped["encoder-a-0"] == ("127.0.0.1", 7001)

    def test_a_gateway_that_needs_other_hosts_does_not_wait_for_them(self) -> None:
        ready = by_name(planned(self.FIRST))["gateway-a-0"].ready
        assert ready == HttpReady("http://192.0.2.1:5000/health/ready")
        waiting = replace(self.FIRST, serves_alone=False, counts=RoleCounts(encoders=1))
        ready = by_name(planned(waiting))["gateway-a-0"].ready
        assert ready == HttpReady("http://192.0.2.1:5000/health/live")


def test_engines_above_the_fewest_stand_by_and_requests_outwait_their_start() -> None:
    options = replace(OPTIONS, counts=RoleCounts(encoders=3, prefill_decodes=2), min_encoders=1)
    topology = planned(options)
    assert [each.name for each in topology.services if each.stands_by] == ["encoder-1", "encoder-2"]
    assert (topology.bounds["encoder"], topology.bounds["prefill_decode"]) == ((1, 3), (2, 2))
    gateway = by_name(topology)["gateway-0"].env_defaults
    assert gateway["TRIPTYCH_ENCODERS_ON_DEMAND"] == "true"
    assert float(gateway["TRIPTYCH_ENCODER_GRACE_S"]) >= 60


def test_a_fixed_number_of_encoders_changes_no_gateway() -> None:
    options = replace(OPTIONS, counts=RoleCounts(encoders=3, prefill_decodes=2), min_prefill_decodes=1)
    topology = planned(options)
    assert [each.name for each in topology.services if each.stands_by] == ["prefill_decode-1"]
    assert "TRIPTYCH_ENCODERS_ON_DEMAND" not in by_name(topology)["gateway-0"].env_defaults


def test_each_engine_has_its_stage() -> None:
    counts = RoleCounts(encoders=1, prefill_decodes=1, prefills=1, decodes=1, encode_prefill_decodes=1)
    topology = planned(replace(OPTIONS, counts=counts))
    stages = {each.name.rpartition("-")[0]: each.stage for each in topology.services if each.stage}
    assert stages == {each: each for each in topology.bounds}
    assert not any(each.stands_by for each in topology.services)
