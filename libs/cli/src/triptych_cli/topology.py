"""Which processes make up the system on one machine: pure, nothing is started or looked up here.

    redis ──▶ cache_store ──▶ encoder-0 …, prefill_decode-0 … ──▶ gateway-0

An arrow says: the right one starts when the left one is ready; stopping goes the other way. Without
`redis` (an existing server is used) the others move up.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

MIB = 1 << 20
MAX_SOCKET_PATH_BYTES = 100  # the kernel allows 107

ENGINE_ENV: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENGINE_ENV: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Idle OpenMP threads sleep instead of spinning: several engines share the cores.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}
"""Defaults for engines on a CPU; what the user has set in the environment wins."""


@dataclass(frozen=True)
class RunLayout:
    """Where one running system keeps its files.

    `run_dir` (tmpfs) holds what must vanish with it: sockets, region, state. `state_dir` (disk) holds
    logs and traces, which may grow and may be looked at afterwards.
    """

    run_dir: Path
    state_dir: Path

    @property
    def redis_socket(self) -> Path:
        return self.run_dir / "redis.sock"

    @property
    def store_socket(self) -> Path:
        return self.run_dir / "store.sock"

    @property
    def ipc_dir(self) -> Path:
        """vLLM's sockets between its own processes."""
        return self.run_dir / "ipc"

    @property
    def state_file(self) -> Path:
        return self.run_dir / "supervisor.json"

    @property
    def lock_file(self) -> Path:
        """Locked by the supervisor as long as it lives."""
        return self.run_dir / "supervisor.lock"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / "logs"

    @property
    def traces_dir(self) -> Path:
        return self.state_dir / "traces"

    def log_file(self, service: str) -> Path:
        return self.logs_dir / f"{service}.log"


@dataclass(frozen=True)
class Options:
    """What the user chose."""

    model: str
    model_is_local: bool
    gateway_port: int
    num_encoders: int = 1
    num_prefill_decodes: int = 1
    redis_url: str | None = None  # None: the embedded server
    deployment: str = "default"
    region_bytes: int = 256 * MIB
    encoder_args: tuple[str, ...] = ()
    prefill_decode_args: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; empty: engines run on the CPU


# ---- readiness: conditions, checked by supervisor.readiness --------------------------------------
@dataclass(frozen=True)
class RedisAnswers:
    url: str


@dataclass(frozen=True)
class StoreAnswers:
    socket: Path


@dataclass(frozen=True)
class Registered:
    """The instance's record is in the registry, under a boot id that was not there before the start."""

    redis_url: str
    deployment: str
    instance: str


@dataclass(frozen=True)
class HttpReady:
    url: str


Readiness = RedisAnswers | StoreAnswers | Registered | HttpReady


@dataclass(frozen=True)
class ServiceSpec:
    """One process: how it is started, when it counts as ready, how long it may take."""

    name: str
    argv: tuple[str, ...]
    ready: Readiness
    after: frozenset[str] = frozenset()
    env: Mapping[str, str] = field(default_factory=dict)  # set over the caller's environment
    env_defaults: Mapping[str, str] = field(default_factory=dict)  # the caller's values win
    start_timeout_s: float = 30.0
    stop_timeout_s: float = 20.0


@dataclass(frozen=True)
class Topology:
    services: tuple[ServiceSpec, ...]  # in an order that respects `after`
    endpoint: str  # OpenAI base URL of the gateway

    def stop_waves(self) -> list[list[ServiceSpec]]:
        """Services that may be stopped together, dependents before what they depend on."""
        left = list(self.services)
        waves: list[list[ServiceSpec]] = []
        while left:
            needed = {name for service in left for name in service.after}
            wave = [service for service in left if service.name not in needed]
            waves.append(wave)
            left = [service for service in left if service.name in needed]
        return waves


def plan(
    options: Options,
    layout: RunLayout,
    *,
    prefill_decode_ports: Sequence[int],
    python: str,
    redis_server: str,
) -> Topology:
    """The services for `options`. `prefill_decode_ports`: one free local port for each prefill_decode."""
    redis_url = options.redis_url or f"unix://{layout.redis_socket}"
    common = {
        "TRIPTYCH_REDIS_URL": redis_url,
        "TRIPTYCH_DEPLOYMENT": options.deployment,
        "TRIPTYCH_RUN_DIR": str(layout.run_dir),
        "TRIPTYCH_STORE_SOCKET": str(layout.store_socket),
        "TRIPTYCH_TRACES_DIR": str(layout.traces_dir),
    }
    services: list[ServiceSpec] = []
    if options.redis_url is None:
        services.append(_redis(layout, redis_server, redis_url))
    below = frozenset(service.name for service in services)

    services.append(
        ServiceSpec(
            name="cache_store-0",
            argv=(python, "-m", "triptych_cache_store"),
            ready=StoreAnswers(layout.store_socket),
            after=below,
            env={
                **common,
                "TRIPTYCH_INSTANCE": "cache_store-0",
                "TRIPTYCH_REGION_BYTES": str(options.region_bytes),
            },
        )
    )
    below |= {"cache_store-0"}
    engines = _engines(options, layout, prefill_decode_ports)
    last_on_gpu: dict[str, str] = {}  # vLLM measures free memory at start: engines of one GPU start in turn
    for engine in engines:
        before = {last_on_gpu[engine.gpu]} if engine.gpu in last_on_gpu else set()
        if engine.gpu is not None:
            last_on_gpu[engine.gpu] = engine.instance
        services.append(
            ServiceSpec(
                name=engine.instance,
                argv=(python, "-m", f"triptych_{engine.package}"),
                ready=Registered(redis_url, options.deployment, engine.instance),
                after=below | before,
                env={
                    **common,
                    **engine.env,
                    "TRIPTYCH_INSTANCE": engine.instance,
                    "TRIPTYCH_ENGINE_ARGS": json.dumps(list(engine.arguments)),
                },
                env_defaults=_engine_env_defaults(options),
                start_timeout_s=600.0,  # loading and compiling a large model
                stop_timeout_s=45.0,  # drain, then the engine's own processes
            )
        )
    endpoint = f"http://127.0.0.1:{options.gateway_port}"
    services.append(
        ServiceSpec(
            name="gateway-0",
            argv=(python, "-m", "triptych_gateway"),
            ready=HttpReady(f"{endpoint}/health/ready"),
            after=below | {engine.instance for engine in engines},
            env={
                **common,
                "TRIPTYCH_INSTANCE": "gateway-0",
                "TRIPTYCH_HOST": "127.0.0.1",
                "TRIPTYCH_PORT": str(options.gateway_port),
            },
        )
    )
    return Topology(tuple(services), f"{endpoint}/v1")


def _redis(layout: RunLayout, redis_server: str, url: str) -> ServiceSpec:
    """The embedded server: reachable by its Unix socket alone, in memory alone, never evicting."""
    arguments = {
        "port": "0",
        "unixsocket": str(layout.redis_socket),
        "unixsocketperm": "600",
        "dir": str(layout.run_dir),
        "save": "",
        "appendonly": "no",
        "maxmemory": "512mb",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    argv = [redis_server, *(word for key, value in arguments.items() for word in (f"--{key}", value))]
    return ServiceSpec("redis", tuple(argv), RedisAnswers(url))


@dataclass(frozen=True)
class _Engine:
    """One engine host before it becomes a `ServiceSpec`."""

    package: str
    instance: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    gpu: str | None = None  # the one it runs on; None: CPU, or several GPUs


def _engines(options: Options, layout: RunLayout, ports: Sequence[int]) -> list[_Engine]:
    env = {"TRIPTYCH_MODEL": options.model, "VLLM_RPC_BASE_PATH": str(layout.ipc_dir)}
    engines = [
        _Engine("encoder", f"encoder-{number}", options.encoder_args, env)
        for number in range(options.num_encoders)
    ]
    engines += [
        _Engine(
            "prefill_decode",
            f"prefill_decode-{number}",
            options.prefill_decode_args,
            {**env, "TRIPTYCH_HOST": "127.0.0.1", "TRIPTYCH_PORT": str(ports[number])},
        )
        for number in range(options.num_prefill_decodes)
    ]
    return _placed_on_gpus(engines, options.gpus) if options.gpus else engines


def _placed_on_gpus(engines: list[_Engine], gpus: Sequence[str]) -> list[_Engine]:
    """Round robin. vLLM takes 90 % of a GPU unless told: engines that share one get equal parts."""
    spread = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
    share = "--gpu-memory-utilization"
    placed = []
    for position, engine in enumerate(engines):
        if _has_flag(engine.arguments, *spread):
            placed.append(engine)  # places itself
            continue
        num_sharing = len(range(position % len(gpus), len(engines), len(gpus)))
        arguments = engine.arguments
        if num_sharing > 1 and not _has_flag(arguments, share):
            arguments = (*arguments, share, f"{0.9 / num_sharing:.2f}")
        gpu = gpus[position % len(gpus)]
        placed.append(
            replace(engine, arguments=arguments, env={**engine.env, "CUDA_VISIBLE_DEVICES": gpu}, gpu=gpu)
        )
    return placed


def _has_flag(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.split("=")[0] in flags for argument in arguments)


def _engine_env_defaults(options: Options) -> dict[str, str]:
    defaults = dict(ENGINE_ENV)
    if not options.gpus:
        defaults |= CPU_ENGINE_ENV
    if options.model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults
