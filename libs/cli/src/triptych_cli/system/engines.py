"""The engine hosts of a topology: their options, environment and GPUs. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_common.cores.plan import plan_cores

ENGINE_ENV: Mapping[str, str] = {"VLLM_NO_USAGE_STATS": "1"}
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

ENCODER_SHARE = 0.10
"""Of a GPU that it shares. An encoder has no KV cache: vLLM asks at its start whether so much is free."""
UNCOUNTED_SHARE = 0.15
"""Of a shared GPU: what vLLM's share does not count. Each process's CUDA context, tensors that were injected
into prefill_decodes, and what the encoder takes beyond its share while it works."""
SMALLEST_SHARE = 0.05


@dataclass(frozen=True)
class Engine:
    """One engine host before it becomes a `ServiceSpec`."""

    package: str
    instance: str
    arguments: tuple[str, ...]
    env: dict[str, str]
    gpu: str | None = None  # the one it runs on; None: CPU, or several GPUs


def engine_hosts(options: ResolvedOptions, layout: RunLayout, ports: Sequence[int]) -> list[Engine]:
    """Encoders first. `ports`: one for each prefill_decode."""
    env = {
        "TRIPTYCH_MODEL": options.model,
        "TMPDIR": str(layout.tmp_dir),
        "VLLM_RPC_BASE_PATH": str(layout.tmp_dir),
    }
    tower: dict[str, str] = {}
    if options.local_encode is not None:
        tower["TRIPTYCH_LOCAL_ENCODE"] = "never" if options.local_encode == "off" else "fallback"
    engines = [
        Engine("encoder", f"encoder-{number}", options.encoder_args, env)
        for number in range(options.num_encoders)
    ]
    engines += [
        Engine(
            "prefill_decode",
            f"prefill_decode-{number}",
            options.prefill_decode_args,
            {**env, **tower, "TRIPTYCH_HOST": "127.0.0.1", "TRIPTYCH_PORT": str(ports[number])},
        )
        for number in range(options.num_prefill_decodes)
    ]
    if options.gpus:
        return _placed_on_gpus(engines, options)
    owned = plan_cores(options.num_encoders, options.num_prefill_decodes, options.cores)
    return [_with_cores(engine, own, options) for engine, own in zip(engines, owned, strict=True)]


def _with_cores(engine: Engine, own: tuple[int, ...], options: ResolvedOptions) -> Engine:
    if not own:
        return engine
    env = {
        "TRIPTYCH_CORE_POLICY": options.core_policy,
        "TRIPTYCH_CORES": json.dumps(own),
        "OMP_NUM_THREADS": str(len(own)),
    }
    return replace(engine, env={**engine.env, **env})


def memory_shares(packages: Sequence[str], slab_share: float) -> list[float]:
    """Parts of one GPU for the engines on it, as `--gpu-memory-utilization` takes them.

    Encoders get what they need; the prefill_decodes' KV caches get the rest, in equal parts.
    """
    num_encoders = packages.count("encoder")
    num_others = len(packages) - num_encoders
    left = 1.0 - UNCOUNTED_SHARE - slab_share - num_encoders * ENCODER_SHARE
    other = max(SMALLEST_SHARE, math.floor(100 * left / max(num_others, 1) + 1e-6) / 100)
    return [ENCODER_SHARE if package == "encoder" else other for package in packages]


def _placed_on_gpus(engines: list[Engine], options: ResolvedOptions) -> list[Engine]:
    """Round robin. vLLM takes 92 % of a GPU by default: engines that share one, or share it with the store's
    slab, get parts."""
    gpus = options.gpus
    spread = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
    share = "--gpu-memory-utilization"
    placed = []
    for position, engine in enumerate(engines):
        if _has_flag(engine.arguments, *spread):
            placed.append(engine)  # places itself
            continue
        number = position % len(gpus)
        slab_share = options.slab_share if number == 0 else 0.0  # the store takes it on the first
        sharing = [each.package for each in engines[number :: len(gpus)]]
        arguments = engine.arguments
        if (len(sharing) > 1 or slab_share) and not _has_flag(arguments, share):
            part = memory_shares(sharing, slab_share)[position // len(gpus)]
            arguments = (*arguments, share, f"{part:.2f}")
        gpu = gpus[position % len(gpus)]
        placed.append(
            replace(engine, arguments=arguments, env={**engine.env, "CUDA_VISIBLE_DEVICES": gpu}, gpu=gpu)
        )
    return placed


def _has_flag(arguments: Sequence[str], *flags: str) -> bool:
    return any(argument.split("=")[0] in flags for argument in arguments)


def engine_env_defaults(options: ResolvedOptions) -> dict[str, str]:
    defaults = dict(ENGINE_ENV)
    if not options.gpus:
        defaults |= CPU_ENGINE_ENV
    if options.model_is_local:
        defaults["HF_HUB_OFFLINE"] = "1"
    return defaults
