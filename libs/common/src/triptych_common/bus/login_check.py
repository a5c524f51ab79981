"""A check of Redis before something expensive is started."""

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


async def check_login(url: str, deployment: str, *, client_name: str) -> None:
    """Connect once, and close. A Redis that is not there yet is no fault: it may come.

    Raises:
        BusRefusedError: login, rights or certificate are wrong.
    """
    try:
        async with await AsyncBus.connect(url, deployment, client_name=client_name):
            return
    except BusRefusedError:
        raise
    except BusUnavailableError as error:
        log.warning("redis is not reachable yet", error=str(error))
