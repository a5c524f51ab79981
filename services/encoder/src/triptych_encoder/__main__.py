"""`python -m triptych_encoder`, and `… healthcheck` for compose."""

import sys

from triptych_common.coordination import is_registered
from triptych_common.runtime import run_service
from triptych_common.runtime.healthcheck import exit_code
from triptych_encoder.settings import EncoderSettings


def main() -> None:
    if sys.argv[1:2] == ["healthcheck"]:
        settings = EncoderSettings.load(sys.argv[2:])
        raise SystemExit(exit_code(is_registered(settings.redis_url, settings.deployment, settings.instance)))
    settings = EncoderSettings.load()
    from triptych_encoder.service import serve  # vLLM takes seconds to import: settings are refused before

    run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
