"""`python -m triptych_fabric`: the fabric agent. `… healthcheck`: exit 0 when it is registered, 2 when not,
1 when that cannot be known.
"""

import sys

from triptych_common.coordination import is_registered
from triptych_common.runtime import run_service
from triptych_common.runtime.healthcheck import exit_code
from triptych_common.telemetry.logs import setup_logging
from triptych_fabric.service import run_fabric
from triptych_fabric.settings import FabricSettings


def main() -> None:
    arguments = sys.argv[1:]
    is_healthcheck = arguments[:1] == ["healthcheck"]
    settings = FabricSettings.load(arguments[1:] if is_healthcheck else arguments)
    setup_logging("fabric", settings.instance, settings.log_level)
    if is_healthcheck:
        sys.exit(exit_code(is_registered(settings.redis_url, settings.deployment, settings.instance)))
    run_service(lambda stop: run_fabric(settings, stop))


if __name__ == "__main__":
    main()
