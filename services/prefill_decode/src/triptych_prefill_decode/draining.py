"""The drain of a prefill_decode, whatever engine it hosts.

    serving --stop--> announced, refusing --last request ended, or the time is over--> drained

Announced first: a gateway whose request is refused looks for another instance, and must not find us.
"""

import asyncio

from triptych_common.coordination import Registration
from triptych_common.runtime.drain import AsgiApp, DrainGate
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

UNGUARDED_PATHS = frozenset({"/health", "/metrics", "/ping", "/status", "/version"})


def guarded(app: AsgiApp) -> DrainGate:
    """`app`, whose requests are counted and in the end refused; but for those that only look at it."""
    return DrainGate(app, lambda path: path not in UNGUARDED_PATHS)


async def drain(registration: Registration, gate: DrainGate, timeout_s: float) -> None:
    """Return when no request runs any more, or after `timeout_s`: what still runs is to be cut off."""
    await registration.announce_draining()
    gate.refuse()
    log.info("draining", num_requests=gate.num_requests)
    try:
        async with asyncio.timeout(timeout_s):
            await gate.wait_idle()
    except TimeoutError:
        log.warning("requests are cut off: not finished in time", num_requests=gate.num_requests)
