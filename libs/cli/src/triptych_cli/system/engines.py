"""Engine hosts of a topology: options, environment and GPUs. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from triptych_cli.roles import HANDING_OVER, TAKING_TENSORS, instance_name, stage_of
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_common.cores.gpu_plan import GpuPlace, plan_gpus
from triptych_common.cores.plan import plan_cores
from triptych_common.domain.engine_args import option_value
from triptych_common.protocol.messages import Role

ENGINE_ENV: Mapping[str, str] = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # as the hosts set it themselves (`host.process_start`)
}
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
    gpus: tuple[str, ...] = ()  # on which it runs; empty: CPU
    stage: str = "encoder"
    number: int = 0  # among those of its stage


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
        Engine(
            "encoder",
            instance_name("encoder", number, options.host_name),
            options.encoder_args,
            env,
            number=number,
        )
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
        arguments, stage = options.prefill_decode_args, stage_of(role)
        engines.append(Engine("prefill_decode", name, arguments, {**env, **own}, stage=stage, number=number))
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
    env = {"TRIPTYCH_CORES": json.dumps(own), "OMP_NUM_THREADS": str(len(own))}
    if engine.package == "encoder":
        env["TRIPTYCH_OTHER_CORES"] = json.dumps(sorted(of_all.difference(own)))
    return replace(engine, env={**engine.env, **env})


def _placed_on_gpus(engines: list[Engine], options: ResolvedOptions) -> list[Engine]:
    """Assign parts of GPUs that several engines or the slab share: vLLM takes 92 % by default."""
    return [
        _on_gpus(engine, place, options) for engine, place in zip(engines, gpu_places(options), strict=True)
    ]


def gpu_places(options: ResolvedOptions) -> list[GpuPlace]:
    """Return the place of each engine, encoders first, without the slab's share where none is set yet."""
    return plan_gpus(
        options.counts.encoders,
        len(options.counts.language_models()),
        options.gpus,
        options.core_policy,
        options.slab_share,
        encoder_width=_num_gpus(options.encoder_args),
        prefill_decode_width=_num_gpus(options.prefill_decode_args),
    )


def uses_slab(options: ResolvedOptions) -> bool:
    """True if an encoder on the first GPU alone, where the slab is, has a taker of tensors beside it."""
    if not options.gpus:
        return False
    roles = [Role.ENCODE] * options.counts.encoders + [role for role, _ in options.counts.language_models()]
    on_first = {
        role
        for role, place in zip(roles, gpu_places(options), strict=True)
        if place.gpus == options.gpus[:1]  # one over several GPUs cannot map it
    }
    return Role.ENCODE in on_first and not on_first.isdisjoint(TAKING_TENSORS)


def _num_gpus(arguments: Sequence[str]) -> int:
    """Number of GPUs that vLLM uses for one engine with these options."""
    number = 1
    for names in (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")):
        value = option_value(arguments, *names) or ""
        number *= max(1, int(value)) if value.isdecimal() else 1
    return number


def _on_gpus(engine: Engine, place: GpuPlace, options: ResolvedOptions) -> Engine:
    share = "--gpu-memory-utilization"
    arguments = engine.arguments
    if place.memory_share is not None and option_value(arguments, share) is None:
        arguments = (*arguments, share, f"{place.memory_share:.2f}")
    env = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus), "TRIPTYCH_GPU_ENGINES": str(place.num_engines)}
    return replace(
        engine,
        arguments=arguments,
        env={**engine.env, **env},
        env_defaults=place.limits.environment() if options.has_mps else {},
        gpus=place.gpus,
    )


def engine_env_defaults(options: ResolvedOptions, layout: RunLayout) -> dict[str, str]:
    # torch would keep it below TMPDIR, which goes with the system, and compile it again after each `up`.
    defaults = {**ENGINE_ENV, "TORCHINDUCTOR_CACHE_DIR": str(layout.compiled_dir)}
    if not options.gpus:
        defaults |= CPU_ENGINE_ENV
    if options.model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults
