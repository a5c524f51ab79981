"""Plan of the processes of one system on one machine. Pure: nothing is started or looked up.

    redis ──▶ cache_store ──▶ encoder-0 …, prefill_decode-0 …, prefill-0 …, decode-0 … ──▶ gateway-0 …
                        `──▶ fabric agent ──▶ (on one of several hosts)

Arrow: the right one starts when the left one is ready; stopping goes the other way. Without
`redis` (an existing server is used) the others move up. Engines of one GPU start one after the other, after
a fault too, and stop together. On one of several hosts the names of instances hold the host's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych_cli.roles import Bounds, instance_name
from triptych_cli.settings import LOOPBACK
from triptych_cli.system.engines import engine_env_defaults, engine_hosts
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import HOST_VARIABLE, HostPlan, ResolvedOptions
from triptych_cli.system.shared_secrets import socket_url
from triptych_common.protocol.urls import base_url

SCALED_ENV: Mapping[str, str] = {
    "TRIPTYCH_ENCODERS_ON_DEMAND": "true",
    "TRIPTYCH_ENCODER_GRACE_S": "300",
    "TRIPTYCH_FIRST_TOKEN_TIMEOUT_S": "300",
    "TRIPTYCH_MAX_QUEUE_AGE_S": "240",
}
"""Defaults of gateways whose encoders start on demand: requests outwait the start of one."""


# ---- readiness: conditions, checked by supervisor.readiness --------------------------------------
@dataclass(frozen=True)
class RedisAnswers:
    url: str


@dataclass(frozen=True)
class StoreAnswers:
    socket: Path


@dataclass(frozen=True)
class Registered:
    """Ready once the instance's record has a boot id that it did not have before the start."""

    redis_url: str
    deployment: str
    instance: str


@dataclass(frozen=True)
class HttpReady:
    url: str


Readiness = RedisAnswers | StoreAnswers | Registered | HttpReady


@dataclass(frozen=True)
class ServiceSpec:
    """One process: how it is started, when it is ready, and its time limits."""

    name: str
    argv: tuple[str, ...]
    ready: Readiness
    after: frozenset[str] = frozenset()  # what it needs: starts after these are ready, stops before them
    starts_after: frozenset[str] = frozenset()  # the first start alone waits for these
    gpus: tuple[str, ...] = ()  # its engine measures free memory there: starts on one wait for each other
    env: Mapping[str, str] = field(default_factory=dict)  # set over the caller's environment
    env_defaults: Mapping[str, str] = field(default_factory=dict)  # the caller's values win
    start_timeout_s: float = 30.0
    stop_timeout_s: float = 20.0
    metrics_port: int | None = None  # where Prometheus scrapes it, at /metrics
    metrics_host: str = "127.0.0.1"
    stage: str = ""  # kind of its engine, such as `encoder`, by which it is scaled; empty: no engine
    stands_by: bool = False  # started when there is work for it


@dataclass(frozen=True)
class Topology:
    services: tuple[ServiceSpec, ...]  # in an order that respects `after` and `starts_after`
    endpoint: str  # OpenAI base URL of the gateway; empty: there is none here
    redis_url: str = ""
    bounds: Mapping[str, Bounds] = field(default_factory=dict)  # by stage

    def stop_waves(self) -> list[list[ServiceSpec]]:
        """Services that may be stopped together, dependents before their dependencies."""
        left = list(self.services)
        waves: list[list[ServiceSpec]] = []
        while left:
            needed = {name for service in left for name in service.after}
            wave = [service for service in left if service.name not in needed]
            waves.append(wave)
            left = [service for service in left if service.name in needed]
        return waves


def plan(
    options: ResolvedOptions,
    layout: RunLayout,
    *,
    prefill_decode_ports: Sequence[int],
    metrics_ports: Sequence[int],
    kv_ports: Sequence[int] = (),
    gateway_ports: Sequence[int] = (),
    python: str,
    redis_server: str,
    redis_password: str | None = None,
) -> Topology:
    """Plan the services for `options`.

    Args:
        prefill_decode_ports: free ports, one for each engine of a language model.
        metrics_ports: likewise, for what has no HTTP of its own: the cache_store, then each encoder, then the
            fabric agent where there is one.
        kv_ports: likewise, for each engine that hands KV caches over, or takes them.
        gateway_ports: likewise, for each gateway of one of several hosts: where those reach it.
        redis_password: of the embedded Redis, where other hosts reach it.
    """
    redis_url = options.redis_url or socket_url(layout.redis_socket, redis_password)
    host = options.host
    common = {
        "TRIPTYCH_REDIS_URL": redis_url,
        "TRIPTYCH_DEPLOYMENT": options.deployment,
        "TRIPTYCH_RUN_DIR": str(layout.run_dir),
        "TRIPTYCH_STORE_SOCKET": str(layout.store_socket),
        "TRIPTYCH_TRACES_DIR": str(layout.traces_dir),
        **({HOST_VARIABLE: host.name} if host else {}),
        # CUDA would number GPUs by speed, nvidia-smi numbers them so: `visible_gpus`, sizes and shares hold.
        **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if options.gpus else {}),
    }
    services: list[ServiceSpec] = []
    if options.redis_url is None:
        services.append(_redis(layout, redis_server, redis_url, host))
    services.append(_store(python, options, layout, common, metrics_ports[0], _names(services)))
    if host is not None:
        services.append(_agent(python, options, host, common, metrics_ports[-1], _names(services)))
    below = _names(services)
    bounds = options.bounds()
    engines = engine_hosts(options, layout, prefill_decode_ports, kv_ports)
    scraped_at = [*metrics_ports[1 : 1 + options.counts.encoders], *prefill_decode_ports]
    last_on_gpu: dict[str, str] = {}  # vLLM measures free memory at start: engines of one GPU start in turn
    for engine, metrics_port in zip(engines, scraped_at, strict=True):
        before = frozenset(last_on_gpu[gpu] for gpu in engine.gpus if gpu in last_on_gpu)
        last_on_gpu |= dict.fromkeys(engine.gpus, engine.instance)
        is_encoder = engine.package == "encoder"
        services.append(
            ServiceSpec(
                name=engine.instance,
                argv=(python, "-m", f"triptych_{engine.package}"),
                ready=Registered(redis_url, options.deployment, engine.instance),
                after=below,
                starts_after=before,
                gpus=engine.gpus,
                env={
                    **common,
                    **engine.env,
                    **(_metrics(metrics_port) if is_encoder else {}),
                    "TRIPTYCH_INSTANCE": engine.instance,
                    "TRIPTYCH_ENGINE_ARGS": json.dumps(list(engine.arguments)),
                },
                env_defaults={**engine_env_defaults(options, layout), **engine.env_defaults},
                start_timeout_s=600.0,  # loading and compiling a large model
                stop_timeout_s=45.0,  # drain, then the engine's own processes
                metrics_port=metrics_port,
                metrics_host=LOOPBACK if is_encoder or host is None else host.address,
                stage=engine.stage,
                stands_by=engine.number >= bounds[engine.stage].low,
            )
        )
    below |= {engine.instance for engine in engines}
    services += [
        _gateway(python, options, layout, number, common, below, gateway_ports)
        for number in range(options.num_gateways)
    ]
    reached = base_url(options.reached_gateway_host, options.gateway_port)
    endpoint = f"{reached}/v1" if options.num_gateways else ""
    return Topology(tuple(services), endpoint, redis_url, bounds)


def _names(services: Sequence[ServiceSpec]) -> frozenset[str]:
    return frozenset(service.name for service in services)


def _store(
    python: str,
    options: ResolvedOptions,
    layout: RunLayout,
    common: Mapping[str, str],
    metrics_port: int,
    after: frozenset[str],
) -> ServiceSpec:
    name = options.host.store if options.host else "cache_store-0"
    return ServiceSpec(
        name=name,
        argv=(python, "-m", "triptych_cache_store"),
        ready=StoreAnswers(layout.store_socket),
        after=after,
        env={
            **common,
            "TRIPTYCH_INSTANCE": name,
            "TRIPTYCH_REGION_BYTES": str(options.region_bytes),
            "TRIPTYCH_KEEP_REGION": "true",  # for a restart alone; it goes with the run directory
            **_metrics(metrics_port),
            **(_store_on_gpu(options, layout) if options.gpus else {}),
        },
        # The first CUDA context of a machine takes long, the more GPUs it has.
        start_timeout_s=120.0 if options.slab_bytes else 30.0,
        metrics_port=metrics_port,
    )


def _store_on_gpu(options: ResolvedOptions, layout: RunLayout) -> dict[str, str]:
    """Environment of a store that has the slab on the first GPU, the only one that it sees.

    It stays outside MPS: the name for MPS' pipes leads nowhere, and CUDA goes without. After a fatal fault of
    one client MPS takes no new client until all have ended. The store does not end, so as a client it would
    keep engines from coming back.
    """
    return {
        "CUDA_VISIBLE_DEVICES": options.gpus[0],
        "CUDA_MPS_PIPE_DIRECTORY": str(layout.run_dir / "no-mps"),
        "TRIPTYCH_SLAB_BYTES": str(options.slab_bytes),
        "TRIPTYCH_SLAB_DEVICE": "0",
    }


def _agent(
    python: str,
    options: ResolvedOptions,
    host: HostPlan,
    common: Mapping[str, str],
    metrics_port: int,
    after: frozenset[str],
) -> ServiceSpec:
    return ServiceSpec(
        name=host.agent,
        argv=(python, "-m", "triptych_fabric"),
        ready=Registered(common["TRIPTYCH_REDIS_URL"], options.deployment, host.agent),
        after=after,
        env={**common, **host.agent_environment(), "TRIPTYCH_INSTANCE": host.agent, **_metrics(metrics_port)},
        stop_timeout_s=30.0,
        metrics_port=metrics_port,
    )


def _gateway(
    python: str,
    options: ResolvedOptions,
    layout: RunLayout,
    number: int,
    common: Mapping[str, str],
    after: frozenset[str],
    internal_ports: Sequence[int],
) -> ServiceSpec:
    host = options.host
    port = options.gateway_port + number
    reached_at = options.reached_gateway_host
    internal_host, internal_port = (host.address, internal_ports[number]) if host else (reached_at, port)
    name = instance_name("gateway", number, options.host_name)
    # Where it cannot serve before other hosts have joined, it is ready when it answers.
    health = "ready" if options.serves_alone else "live"
    return ServiceSpec(
        name=name,
        argv=(python, "-m", "triptych_gateway"),
        ready=HttpReady(f"{base_url(internal_host, internal_port)}/health/{health}"),
        after=after,
        env={
            **common,
            "TRIPTYCH_INSTANCE": name,
            "TRIPTYCH_HOST": options.gateway_host,
            "TRIPTYCH_PORT": str(port),
            **(host.gateway_environment(internal_port) if host else {}),
            **_encode_decision(options),
        },
        env_defaults={
            "TRIPTYCH_FILES_DIR": str(layout.files_dir),
            **(SCALED_ENV if options.scales_encoders else {}),
            # One gateway has no balancer in front of it that would have to notice its end.
            **({"TRIPTYCH_DRAIN_GRACE_S": "0"} if options.num_gateways == 1 else {}),
        },
        stop_timeout_s=30.0,
        metrics_port=internal_port,
        metrics_host=internal_host,
    )


def _metrics(port: int) -> dict[str, str]:
    return {"TRIPTYCH_METRICS_HOST": LOOPBACK, "TRIPTYCH_METRICS_PORT": str(port)}


def _encode_decision(options: ResolvedOptions) -> dict[str, str]:
    if options.local_encode is None:
        return {}
    return {"TRIPTYCH_ENCODE_DECISION": "auto" if options.local_encode == "auto" else "remote"}


def _redis(layout: RunLayout, redis_server: str, url: str, host: HostPlan | None) -> ServiceSpec:
    """The embedded Redis: in memory only, never evicting, on a Unix socket.

    For several hosts it also listens on TCP, with the password of its configuration file.
    """
    is_shared = host is not None and host.redis_port is not None
    arguments = {
        "port": str(host.redis_port) if host is not None and is_shared else "0",
        "unixsocket": str(layout.redis_socket),
        "unixsocketperm": "600",
        "dir": str(layout.run_dir),
        "save": "",
        "appendonly": "no",
        "maxmemory": "512mb",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        **({"bind": host.address} if host is not None and is_shared else {}),
    }
    config = [str(layout.redis_config)] if is_shared else []
    argv = [
        redis_server,
        *config,
        *(part for key, value in arguments.items() for part in (f"--{key}", value)),
    ]
    return ServiceSpec("redis", tuple(argv), RedisAnswers(url))
