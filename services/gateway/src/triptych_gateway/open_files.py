"""How many files this process may have open: sockets are files, and a request has two of them."""

import resource

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

PER_REQUEST = 2  # its caller's connection, and the one to its prefill_decode
OTHERS = 256  # connections without a request, encoders', Redis', media servers', files, the program itself


def allow_open_files(max_requests: int) -> None:
    """Raise this process' own limit as far as `max_requests` at once need it, and the system allows it."""
    needed = PER_REQUEST * max_requests + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    reached = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < needed:
        log.warning(
            "too few files may be open",
            limit=reached,
            needed=needed,
        )
