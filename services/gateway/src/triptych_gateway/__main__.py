"""`python -m triptych_gateway`: the service. `… healthcheck`: exit 0 when it is ready, 2 when it does not
answer, else 1.

Large blocks of memory are taken from the system, and given back at once. By itself glibc begins to keep them
among small ones when the first has been given back. Media that grow side by side are then copied again and
again, on the event loop, and leave holes: 25 uploads of 20 MiB took 687 to 766 MiB instead of 560, and 706
were still held when all had ended. The price is pages that are new each time: up to 1 ms of CPU time for each
MiB.
"""

import ctypes
import sys

from triptych_common.runtime import run_service
from triptych_common.telemetry import setup_logging, setup_service_tracing
from triptych_gateway.request.image_header import set_up_pillow
from triptych_gateway.service import health_code, run
from triptych_gateway.settings import GatewaySettings

MIN_BLOCK_BYTES = 512 << 10  # larger ones are mapped: growing moves page tables, and copies nothing
_M_MMAP_THRESHOLD = -3  # of mallopt(3)


def map_large_blocks() -> None:
    """Set the threshold for this process, if the C library has such an option."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MIN_BLOCK_BYTES)


def main() -> None:
    arguments = sys.argv[1:]
    checks_health = arguments[:1] == ["healthcheck"]
    settings = GatewaySettings.load(arguments[1:] if checks_health else arguments)
    if checks_health:
        sys.exit(health_code(settings))
    setup_logging("gateway", settings.instance, settings.log_level)
    set_up_pillow(settings.max_image_pixels)
    map_large_blocks()
    provider = setup_service_tracing("gateway", settings, settings.tail_sampling)
    try:
        run_service(lambda stop: run(settings, stop))
    finally:
        provider.shutdown()


if __name__ == "__main__":
    main()
