"""`python -m triptych_cache_store`: the daemon. `… healthcheck`: exit 0 when it answers, else 1."""

import asyncio
import os
import sys

from triptych_cache_store.service import is_healthy, run_store
from triptych_cache_store.settings import StoreSettings
from triptych_common.runtime import run_service
from triptych_common.telemetry.logs import setup_logging


def main() -> None:
    arguments = sys.argv[1:]
    checks_health = arguments[:1] == ["healthcheck"]
    settings = StoreSettings.load(arguments[1:] if checks_health else arguments)
    setup_logging("cache_store", settings.instance, settings.log_level)
    if checks_health:
        sys.exit(0 if asyncio.run(is_healthy(settings, f"healthcheck/{os.getpid()}")) else 1)
    run_service(lambda stop: run_store(settings, stop))


if __name__ == "__main__":
    main()
