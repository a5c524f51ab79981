"""KV transfer between instances: vLLM's options and environment for prefill and for decode.

    prefill: kv_producer ──KV cache, read by──▶ decode: kv_consumer

vLLM's NIXL connector moves the caches. A prefill instance listens on its side channel, where decode instances
ask how its memory can be read, and keeps a KV cache until it was read, or its lease is over.
"""

import contextlib
import hashlib
import ipaddress
import random
import socket
import warnings
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

import orjson

from triptych_common.protocol.messages import KvTransfer, Role
from triptych_common.protocol.urls import ANY_ADDRESSES
from triptych_vllm_connector.host.engine_options import UnsupportedOptionError

KV_CONNECTOR = "NixlConnector"
OPTION = "--kv-transfer-config"
LEASE = "kv_lease_duration"  # of the connector's options
LAST_PORT = 32_767  # above, as a rule, are those that the system gives to connections
CPU_BLOCK_SIZE = 32
"""Tokens of a KV block; vLLM's default on CPUs is 128, and the rest behind the last whole block is never
cached."""
KV_ROLES: Mapping[Role, Literal["kv_producer", "kv_consumer"]] = {
    Role.PREFILL: "kv_producer",
    Role.ENCODE_PREFILL: "kv_producer",
    Role.DECODE: "kv_consumer",
}


def is_handing_over(role: Role) -> bool:
    """True if instances of this role hand KV caches over, or take them."""
    return role in KV_ROLES


def kv_transfer_config(
    role: Role, lease_s: int, connector_options: Mapping[str, Any], on_gpu: bool
) -> dict[str, Any]:
    """Fields of vLLM's `KVTransferConfig`; `connector_options` override the connector's defaults.

    Raises:
        UnsupportedOptionError: they set the lease.
    """
    if LEASE in connector_options:
        raise UnsupportedOptionError(
            f"TRIPTYCH_KV_CONNECTOR_OPTIONS cannot have {LEASE}: set TRIPTYCH_KV_LEASE_S instead"
        )
    # A transfer on the CPU is a copy: threads of its own would only take cores from the engines.
    own: dict[str, Any] = {LEASE: lease_s} if on_gpu else {LEASE: lease_s, "num_threads": 0}
    config = {
        "kv_connector": KV_CONNECTOR,
        "kv_role": KV_ROLES[role],
        # A failed load is prefilled again elsewhere: this instance may not be able to compute it.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {**own, **connector_options},
    }
    return config if on_gpu else {**config, "kv_buffer_device": "cpu"}


def kv_transfer_options(config: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """vLLM's command-line options for this KV transfer configuration."""
    option = f"{OPTION}={orjson.dumps(config).decode()}"
    return [option] if on_gpu else [option, f"--block-size={CPU_BLOCK_SIZE}"]


def check_kv_transfer(parsed: Any, wanted: Mapping[str, Any], role: Role) -> None:
    """Check vLLM's parsed `kv_transfer_config` against the wanted one.

    Raises:
        UnsupportedOptionError: the options that were passed through have one of their own.
    """
    if parsed is None or any(getattr(parsed, name) != value for name, value in wanted.items()):
        raise UnsupportedOptionError(
            f"{OPTION} cannot be set with TRIPTYCH_ROLE={role.value}, which sets it. "
            "TRIPTYCH_KV_LEASE_S and TRIPTYCH_KV_CONNECTOR_OPTIONS set parts of it"
        )


def kv_environment(host: str, port: int, on_gpu: bool, known: Container[str]) -> dict[str, str]:
    """Environment of the engine's processes, set before they start.

    Args:
        host: an address or a name of this machine, at which others reach the side channel.
        known: names of variables that the user has set; of UCX's those win.
    """
    address = address_of(host)
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    defaults = {} if on_gpu else {"UCX_TLS": "tcp,self,sm"}
    if ipaddress.ip_address(address).is_loopback:
        defaults["UCX_NET_DEVICES"] = "lo"  # by default UCX listens on all of them
    return environment | {name: value for name, value in defaults.items() if name not in known}


def address_of(host: str) -> str:
    """Numeric address of `host`: the side channel binds to no name."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def side_channel_host(host: str, announced: str) -> str:
    """An address of this machine for the side channel.

    Many systems have the machine's own name as 127.0.1.1, which no other machine reaches.

    Args:
        host: that vLLM's HTTP server listens on.
        announced: at which others reach it.

    Raises:
        UnsupportedOptionError: only the HTTP server would be reached by others.
    """
    address = address_of(announced)
    if not (host in ANY_ADDRESSES and _is_loopback(address)) or _is_loopback(announced):
        return address
    from vllm.utils.network_utils import get_ip

    with warnings.catch_warnings(action="ignore"):  # it finds none
        found: str = get_ip()
    if found in ANY_ADDRESSES or _is_loopback(found):
        raise UnsupportedOptionError(
            f"{announced} is {address} here, where no other machine reaches this instance's KV caches: "
            "set TRIPTYCH_ADVERTISED_HOST to an address of this machine"
        )
    return found


def _is_loopback(host: str) -> bool:
    """True for a loopback address, or the name `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(host: str) -> int:
    """A port of `host` that nothing uses now, and no connection gets before the engine listens there."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in (*random.sample(range(20_000, LAST_PORT + 1), 100), 0):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    raise UnsupportedOptionError(
        f"{address} is no address of this machine, so KV caches cannot be read there"
    )


def announced_kv_transfer(
    vllm_config: Any, namespace_digest: str, lease_s: int, rendering: Sequence[object] = ()
) -> KvTransfer:
    """KV transfer as the instance's registry record announces it.

    Args:
        rendering: what prompts are made with, beside the model's own files.
    """
    from vllm import envs

    cache, model = vllm_config.cache_config, vllm_config.model_config
    attention = getattr(vllm_config, "attention_config", None)
    speculative = vllm_config.speculative_config
    alike: Sequence[object] = (
        namespace_digest,
        KV_CONNECTOR,
        model.model,  # vLLM compares the name or path itself, too
        str(model.dtype),
        cache.block_size,
        str(cache.cache_dtype),
        str(envs.VLLM_KV_CACHE_LAYOUT),
        getattr(attention, "backend", None),
        None if speculative is None else (speculative.method, speculative.model),
        lease_s,  # a reader counts its heartbeats by its own
        *rendering,
    )
    digest = hashlib.sha256(repr(alike).encode()).hexdigest()
    return KvTransfer(connector=KV_CONNECTOR, compatibility=digest, lease_s=lease_s)
