"""Which processes make up the system on one machine: pure, nothing is started or looked up here.

    redis ──▶ cache_store ──▶ encoder-0 …, prefill_decode-0 …, prefill-0 …, decode-0 … ──▶ gateway-0 …

Arrow: the right one starts when the left one is ready; stopping goes the other way. Without
`redis` (an existing server is used) the others move up. Engines of one GPU start one after the other,
and stop together.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triptych_cli.system.engines import engine_env_defaults, engine_hosts
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions


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
    after: frozenset[str] = frozenset()  # what it needs: starts after these are ready, stops before them
    starts_after: frozenset[str] = frozenset()  # the start alone waits for these
    env: Mapping[str, str] = field(default_factory=dict)  # set over the caller's environment
    env_defaults: Mapping[str, str] = field(default_factory=dict)  # the caller's values win
    start_timeout_s: float = 30.0
    stop_timeout_s: float = 20.0
    metrics_port: int | None = None  # of 127.0.0.1: where Prometheus scrapes it, at /metrics


@dataclass(frozen=True)
class Topology:
    services: tuple[ServiceSpec, ...]  # in an order that respects `after` and `starts_after`
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
    options: ResolvedOptions,
    layout: RunLayout,
    *,
    prefill_decode_ports: Sequence[int],
    metrics_ports: Sequence[int],
    kv_ports: Sequence[int] = (),
    python: str,
    redis_server: str,
) -> Topology:
    """The services for `options`.

    Args:
        prefill_decode_ports: free local ports, one for each engine of a language model.
        metrics_ports: likewise, for what has no HTTP of its own: the cache_store, then each encoder.
        kv_ports: likewise, for each engine that hands KV caches over, or takes them.
    """
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
                "TRIPTYCH_KEEP_REGION": "true",  # for a restart alone; it goes with the run directory
                **_metrics(metrics_ports[0]),
            },
            metrics_port=metrics_ports[0],
        )
    )
    below |= {"cache_store-0"}
    engines = engine_hosts(options, layout, prefill_decode_ports, kv_ports)
    scraped_at = [*metrics_ports[1:], *prefill_decode_ports]
    last_on_gpu: dict[str, str] = {}  # vLLM measures free memory at start: engines of one GPU start in turn
    for engine, metrics_port in zip(engines, scraped_at, strict=True):
        before = frozenset({last_on_gpu[engine.gpu]}) if engine.gpu in last_on_gpu else frozenset()
        if engine.gpu is not None:
            last_on_gpu[engine.gpu] = engine.instance
        services.append(
            ServiceSpec(
                name=engine.instance,
                argv=(python, "-m", f"triptych_{engine.package}"),
                ready=Registered(redis_url, options.deployment, engine.instance),
                after=below,
                starts_after=before,
                env={
                    **common,
                    **engine.env,
                    **(_metrics(metrics_port) if engine.package == "encoder" else {}),
                    "TRIPTYCH_INSTANCE": engine.instance,
                    "TRIPTYCH_ENGINE_ARGS": json.dumps(list(engine.arguments)),
                },
                env_defaults={**engine_env_defaults(options), **engine.env_defaults},
                start_timeout_s=600.0,  # loading and compiling a large model
                stop_timeout_s=45.0,  # drain, then the engine's own processes
                metrics_port=metrics_port,
            )
        )
    below |= {engine.instance for engine in engines}
    services += [
        _gateway(python, options, layout, number, common, below) for number in range(options.num_gateways)
    ]
    return Topology(tuple(services), f"http://127.0.0.1:{options.gateway_port}/v1")


def _gateway(
    python: str,
    options: ResolvedOptions,
    layout: RunLayout,
    number: int,
    common: Mapping[str, str],
    after: frozenset[str],
) -> ServiceSpec:
    port = options.gateway_port + number
    return ServiceSpec(
        name=f"gateway-{number}",
        argv=(python, "-m", "triptych_gateway"),
        ready=HttpReady(f"http://127.0.0.1:{port}/health/ready"),
        after=after,
        env={
            **common,
            "TRIPTYCH_INSTANCE": f"gateway-{number}",
            "TRIPTYCH_HOST": "127.0.0.1",
            "TRIPTYCH_PORT": str(port),
            **_encode_decision(options),
        },
        env_defaults={
            "TRIPTYCH_FILES_DIR": str(layout.files_dir),
            # One gateway has no balancer in front of it that would have to notice its end.
            **({"TRIPTYCH_DRAIN_GRACE_S": "0"} if options.num_gateways == 1 else {}),
        },
        stop_timeout_s=30.0,
        metrics_port=port,
    )


def _metrics(port: int) -> dict[str, str]:
    return {"TRIPTYCH_METRICS_HOST": "127.0.0.1", "TRIPTYCH_METRICS_PORT": str(port)}


def _encode_decision(options: ResolvedOptions) -> dict[str, str]:
    if options.local_encode is None:
        return {}
    return {"TRIPTYCH_ENCODE_DECISION": "auto" if options.local_encode == "auto" else "remote"}


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
    argv = [redis_server, *(part for key, value in arguments.items() for part in (f"--{key}", value))]
    return ServiceSpec("redis", tuple(argv), RedisAnswers(url))
