"""Makes this machine one of several hosts: its name and address, its key, and the Redis it joins."""

import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from triptych_cli.options import HostOptions, SystemOptions
from triptych_cli.settings import LOOPBACK, CliSettings
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.resolved_options import NUM_PORTS_LIMIT, HostPlan
from triptych_cli.system.shared_secrets import KEY_FILE_NAME, SharedSecretError, check_key, read_url
from triptych_common.protocol.urls import ANY_ADDRESSES, check_host
from triptych_common.redis_client.address import RedisAddress

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


class JoinError(Exception):
    """The machine cannot be such a host; the text names the remedy."""


@dataclass(frozen=True)
class JoinTarget:
    redis_url: str
    folder: Path | None  # with the key; None: a URL was given


def join_target(text: str) -> JoinTarget:
    """Parse `text`: the URL of a Redis, or the folder that the first host has made.

    Raises:
        JoinError: it is neither.
    """
    if "://" in text:
        return JoinTarget(text, None)
    folder = Path(text).expanduser().absolute()
    try:
        return JoinTarget(read_url(folder), folder)
    except SharedSecretError as error:
        raise JoinError(
            f"--join needs the URL of a Redis, or a folder that the first host made: {error}"
        ) from None


def plan_host(options: SystemOptions, layout: RunLayout) -> HostPlan | None:
    """Check and complete the options about several hosts; None for a single host. Changes nothing.

    Raises:
        JoinError: it cannot be so.
    """
    hosts = options.hosts
    if not (hosts.fabric or hosts.joins or hosts.fabric_host):
        if options.num_gateways == 0:
            raise JoinError("--gateways 0 is for a host of several: add --fabric, or --join")
        return None
    redis = None if options.redis_url is None else _parsed(options.redis_url)
    address = _own_address(hosts, redis)
    if options.redis_url is not None and redis is not None:
        _check_reach(options.redis_url, redis, address)
    return HostPlan(
        name=host_name(hosts.host),
        address=address,
        fabric_port=hosts.fabric_port,
        key_file=_key_file(hosts, layout),
        redis_port=None if options.redis_url is not None else hosts.redis_port,
    )


def host_name(wanted: str | None) -> str:
    """Host name as it appears in the names of instances.

    Raises:
        JoinError: it holds other characters than they may.
    """
    if wanted is not None and _NAME.fullmatch(wanted) is None:
        raise JoinError(f"--host {wanted!r} must be letters, digits and ._- (at most 100)")
    return wanted or _NOT_IN_NAMES.sub("-", socket.gethostname())[:100].strip("-") or "host"


def check_ports(plan: HostPlan, ports: tuple[int, ...]) -> None:
    """Check that all ports for other hosts can be listened on.

    Raises:
        JoinError: one is taken, or the address is not this machine's.
    """
    redis = () if plan.redis_port is None else (plan.redis_port,)
    for port in (plan.fabric_port, *ports, *redis):
        option = "--redis-port" if port in redis else "--fabric-port"
        if port >= NUM_PORTS_LIMIT:
            raise JoinError(f"there is no port {port}; choose a lower {option}")
        try:
            family = socket.getaddrinfo(plan.address, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family[0]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(family[4])
        except OSError as error:
            raise JoinError(
                f"port {port} of {plan.address} cannot be listened on ({error.strerror}); choose {option}, "
                "or --fabric-host, an address of this machine"
            ) from None


def _parsed(redis_url: str) -> RedisAddress:
    try:
        return RedisAddress.parse(redis_url)
    except ValueError as error:
        raise JoinError(f"the URL of Redis {error}") from None


def _own_address(hosts: HostOptions, redis: RedisAddress | None) -> str:
    if hosts.fabric_host is None:
        return _address_towards(redis) if hosts.joins and redis is not None else LOOPBACK
    try:
        address = check_host(hosts.fabric_host)
    except ValueError as error:
        raise JoinError(f"--fabric-host {error}") from None
    if address in ANY_ADDRESSES:
        raise JoinError(
            f"--fabric-host {hosts.fabric_host} stands for all addresses: name the one that the other "
            "hosts reach, of the network between them"
        )
    return address


def _address_towards(redis: RedisAddress) -> str:
    """Address from which this machine connects to Redis, where the other hosts are, too."""
    host, port = (
        *redis.sentinels, *redis.nodes, (redis.options.get("host"), redis.options.get("port", 6379))
    )[0]  # fmt: skip
    if host is None:  # a Unix socket
        return LOOPBACK
    try:
        family, kind, protocol, _, peer = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(peer)  # connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise JoinError(
            f"no way to {host} was found ({error.strerror}); name this machine's address: --fabric-host"
        ) from None


def _check_reach(url: str, redis: RedisAddress, address: str) -> None:
    """Raise JoinError if the other hosts could not reach what `url` names."""
    if _is_loopback(address):
        return
    host = urlsplit(url).hostname
    if "path" in redis.options or (not redis.sentinels and host is not None and _is_loopback(host)):
        raise JoinError(
            "the other hosts do not reach this Redis: name it by an address of the network between"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key_file(hosts: HostOptions, layout: RunLayout) -> Path | None:
    """Key file; None if the agents show certificates and no key was named."""
    if hosts.fabric_key_file is not None:
        file = Path(hosts.fabric_key_file).expanduser().absolute()
    elif CliSettings().fabric_tls_cert_file is not None:
        return None
    else:
        file = layout.join_dir / KEY_FILE_NAME
    if not file.exists() and not hosts.joins and hosts.fabric_key_file is None:
        return file  # it is made when the system starts
    try:
        check_key(file)
    except SharedSecretError as error:
        hint = "" if file.exists() else "; copy it from the first host: its `up` says where it is"
        raise JoinError(f"{error}{hint}") from None
    return file
