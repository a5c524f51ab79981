"""`python -m triptych_gateway`: the service. `… healthcheck`: exit 0 when it is ready, 2 when it does not
answer, else 1.
"""

import sys

from triptych_common.runtime import run_service
from triptych_common.telemetry import setup_logging, setup_service_tracing
from triptych_gateway.memory import map_large_blocks
from triptych_gateway.request.image_header import set_up_pillow
from triptych_gateway.service import health_code, run
from triptych_gateway.settings import GatewaySettings


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
