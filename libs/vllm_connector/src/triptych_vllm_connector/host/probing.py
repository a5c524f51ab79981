"""What an instance finds out about its machine before it announces its transports."""

from pathlib import Path

from triptych_common.domain.errors import StoreError
from triptych_common.region import RegionMapping
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

PROBE_TIMEOUT_S = 5.0


def has_region(socket: Path, instance: str) -> bool:
    """Whether this process can map the region of the store at `socket`. May take `PROBE_TIMEOUT_S`."""
    try:
        session = StoreSession.connect(socket, f"{instance}/probe", timeout_s=PROBE_TIMEOUT_S)
        try:
            welcome = session.welcome
            RegionMapping.open(welcome.region_path, welcome.region_num_bytes, populate=False).close()
        finally:
            session.close()
    except StoreError as error:
        log.warning("the region cannot be used", error=str(error))
        return False
    return True
