"""Steps of a host before it imports vLLM; this module imports none of it."""

import os

from triptych_common.runtime import ServiceSettings
from triptych_common.runtime.service import FAILED_EXIT_CODE
from triptych_common.telemetry import setup_logging
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.versions import SUPPORTED_VLLM, UnsupportedVLLMError, vllm_version

log = get_logger(__name__)


def require_supported_vllm(service: str, settings: ServiceSettings) -> None:
    """Log which vLLM is installed and which are supported, and refuse any other one, or none.

    The import of another one may fail in ways that name no version.

    Raises:
        SystemExit: it is refused (logged here).
    """
    setup_logging(service, settings.instance, settings.log_level)
    try:
        log.info("engine starts", vllm=vllm_version(), supported=list(SUPPORTED_VLLM))
    except UnsupportedVLLMError as error:
        log.error("service failed", error=str(error), kind=type(error).__name__)  # noqa: TRY400 -- its text is enough
        raise SystemExit(FAILED_EXIT_CODE) from None


def spawn_engines() -> None:
    """Let vLLM spawn EngineCore and its workers; the user's own choice wins.

    By vLLM's default they are forked on a GPU. A forked process keeps its parent's listening sockets and,
    before Python 3.12, the socket pair by which a signal wakes the parent's event loop: SIGTERM for
    EngineCore would then run the host's handler as well, and end the host before it has drained.
    """
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # noqa: TID251 -- vLLM has no other way
