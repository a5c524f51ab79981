"""Engine hosts of a topology: options, environment and GPUs. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from triptych_cli.roles import HANDING_OVER, instance_name
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_common.cores.gpu_plan import GpuPlace, plan_gpus
from triptych_common.cores.plan import plan_cores
from triptych_common.protocol.messages import Role

ENGINE_ENV: Mapping[str, str] = {"VLLM_NO_USAGE_STATS": "1"}
CPU_ENGINE_ENV: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Idle OpenMP threads sleep instead of spinning: several engines share the cores.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    # The worker runs in EngineCore's process, as on one GPU: a process less to start, and no message
    # between two processes for each step. Of several workers each has its own all the same.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Default environment of engines on a CPU; the user's own variables override it."""


@dataclass(frozen=True)
class Engine:
    """One engine host before it becomes a `ServiceSpec`."""

    package: str
    instance: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    env_defaults: dict[str, str] = field(default_factory=dict)  # the caller's values win
    gpu: str | None = None  # the one it runs on; None: CPU, or several GPUs


def engine_hosts(
    options: ResolvedOptions, layout: RunLayout, ports: Sequence[int], kv_ports: Sequence[int] = ()
) -> list[Engine]:
    """Engine hosts, encoders first.

    Args:
        ports: one for each engine of a language model.
        kv_ports: one for each that hands KV caches over, or takes them.
    """
    env = {
        "TRIPTYCH_MODEL": options.model,
        "TRIPTYCH_CORE_POLICY": options.core_policy,
        "TMPDIR": str(layout.tmp_dir),
        "VLLM_RPC_BASE_PATH": str(layout.tmp_dir),
    }
    counts = options.counts
    engines = [
        Engine("encoder", instance_name("encoder", number, options.host_name), options.encoder_args, env)
        for number in range(counts.encoders)
    ]
    free_kv_ports = iter(kv_ports)
    address = options.host.address if options.host else "127.0.0.1"
    for (role, number), port in zip(counts.language_models(), ports, strict=True):
        own = {"TRIPTYCH_ROLE": role.value, "TRIPTYCH_HOST": address, "TRIPTYCH_PORT": str(port)}
        if role in HANDING_OVER:
            own["TRIPTYCH_KV_PORT"] = str(next(free_kv_ports))
        own |= _tower(role, options)
        name = instance_name(role, number, options.host_name)
        engines.append(Engine("prefill_decode", name, options.prefill_decode_args, {**env, **own}))
    if options.gpus:
        return _placed_on_gpus(engines, options)
    owned = plan_cores(counts.encoders, len(engines) - counts.encoders, options.cores)
    of_all = frozenset(core for own in owned for core in own)
    return [_with_cores(engine, own, of_all) for engine, own in zip(engines, owned, strict=True)]


def _tower(role: Role, options: ResolvedOptions) -> dict[str, str]:
    """Local encode of a role: only prefill_decodes follow the options; other roles have a tower or none."""
    if role is not Role.PREFILL_DECODE:
        return {"TRIPTYCH_LOCAL_ENCODE": "never"}
    if options.local_encode is None:
        return {}
    return {"TRIPTYCH_LOCAL_ENCODE": "never" if options.local_encode == "off" else "fallback"}


def _with_cores(engine: Engine, own: tuple[int, ...], of_all: frozenset[int]) -> Engine:
    if not own:
        return engine
    env = {
        "TRIPTYCH_CORES": json.dumps(own),
        "OMP_NUM_THREADS": str(len(own)),
    }
    if engine.package == "encoder":
        env["TRIPTYCH_OTHER_CORES"] = json.dumps(sorted(of_all.difference(own)))
    return replace(engine, env={**engine.env, **env})


def _placed_on_gpus(engines: list[Engine], options: ResolvedOptions) -> list[Engine]:
    """Assign parts of GPUs that several engines or the slab share: vLLM takes 92 % by default."""
    places = plan_gpus(
        options.counts.encoders,
        len(engines) - options.counts.encoders,
        options.gpus,
        options.core_policy,
        options.slab_share,
    )
    return [_on_gpu(engine, place, options) for engine, place in zip(engines, places, strict=True)]


def _on_gpu(engine: Engine, place: GpuPlace, options: ResolvedOptions) -> Engine:
    if _has_flag(engine.arguments, "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"):
        return engine  # places itself
    share = "--gpu-memory-utilization"
    arguments = engine.arguments
    if place.memory_share is not None and not _has_flag(arguments, share):
        arguments = (*arguments, share, f"{place.memory_share:.2f}")
    env = {
        "CUDA_VISIBLE_DEVICES": place.gpu,
        "TRIPTYCH_GPU_ENGINES": str(place.num_engines),
    }
    return replace(
        engine,
        arguments=arguments,
        env={**engine.env, **env},
        env_defaults=place.limits.environment() if options.has_mps else {},
        gpu=place.gpu,
    )


def _has_flag(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.split("=")[0] in flags for argument in arguments)


def engine_env_defaults(options: ResolvedOptions, layout: RunLayout) -> dict[str, str]:
    # torch would keep it below TMPDIR, which goes with the system, and compile it again after each `up`.
    defaults = {**ENGINE_ENV, "TORCHINDUCTOR_CACHE_DIR": str(layout.compiled_dir)}
    if not options.gpus:
        defaults |= CPU_ENGINE_ENV
    if options.model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults
