"""`python -m triptych_cache_store`: the daemon. `… healthcheck`: exit 0 when it answers, else 2.
`… relay`: the store's metrics on a port, where the daemon has no network.
"""

import asyncio
import os
import sys

from triptych_cache_store.scrape_relay import run_relay
from triptych_cache_store.service import is_healthy, run_store
from triptych_cache_store.settings import StoreSettings
from triptych_common.runtime import run_service
from triptych_common.runtime.healthcheck import exit_code
from triptych_common.telemetry.logs import setup_logging

COMMANDS = ("healthcheck", "relay")


def main() -> None:
    arguments = sys.argv[1:]
    command = arguments[0] if arguments[:1] and arguments[0] in COMMANDS else None
    settings = StoreSettings.load(arguments if command is None else arguments[1:])
    setup_logging("cache_store", settings.instance, settings.log_level)
    if command == "healthcheck":
        sys.exit(exit_code(asyncio.run(is_healthy(settings, f"healthcheck/{os.getpid()}"))))
    if command == "relay":
        run_service(lambda stop: run_relay(settings, stop))
    run_service(lambda stop: run_store(settings, stop))


if __name__ == "__main__":
    main()
