"""`python -m triptych_prefill_decode`, and `… healthcheck` for compose."""

import sys

from triptych_common.coordination import is_registered
from triptych_common.runtime import run_service
from triptych_common.runtime.healthcheck import exit_code
from triptych_prefill_decode.settings import PrefillDecodeSettings
from triptych_vllm_connector.host.process_start import require_supported_vllm, spawn_engines


def main() -> None:
    if sys.argv[1:2] == ["healthcheck"]:
        settings = PrefillDecodeSettings.load(sys.argv[2:])
        raise SystemExit(exit_code(is_registered(settings.redis_url, settings.deployment, settings.instance)))
    settings = PrefillDecodeSettings.load()
    require_supported_vllm("prefill_decode", settings)
    spawn_engines()
    # vLLM takes seconds to import: settings and versions are refused before.
    from triptych_prefill_decode.service import serve
    from triptych_vllm_connector.host.engine_fork import fork_engine

    fork_engine()
    run_service(lambda stop: serve(settings, stop))


if __name__ == "__main__":
    main()
