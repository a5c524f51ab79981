"""Transports that work on this machine, best first."""

import os
from collections.abc import Sequence

from triptych_common.protocol.messages import FabricTransport
from triptych_common.region.mapping import RegionMapping
from triptych_common.telemetry.logs import get_logger
from triptych_fabric.transports.nixl import NixlTransport
from triptych_fabric.transports.nixl_memory import NixlError, load_nixl
from triptych_fabric.transports.transport import Transport

log = get_logger(__name__)


def usable_transports(
    wanted: Sequence[FabricTransport], listen_host: str = ""
) -> tuple[FabricTransport, ...]:
    """Wanted transports that work on this machine.

    Args:
        listen_host: of the agent; on a loopback address UCX, too, listens on the loopback interface alone.

    Raises:
        NixlError: none of them.
    """
    usable = list(wanted)
    if FabricTransport.NIXL in usable:
        if listen_host == "localhost" or listen_host.startswith(("127.", "::1")):
            # UCX has no other configuration than its environment, and by default listens on all interfaces.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # noqa: TID251
        try:
            load_nixl()  # here, not in the thread of the first link: it takes seconds
        except NixlError as error:
            usable.remove(FabricTransport.NIXL)
            if not usable:
                raise
            log.warning("nixl cannot be used, entries go by the other transports", error=str(error))
    return tuple(usable)


def make_transports(
    kinds: Sequence[FabricTransport], mapping: RegionMapping, progress_timeout_s: float
) -> dict[FabricTransport, Transport]:
    """Transports of an agent by kind, best first."""
    made: list[Transport] = [Transport(), NixlTransport(mapping, progress_timeout_s)]
    by_kind = {each.kind: each for each in made}
    return {kind: by_kind[kind] for kind in kinds}
