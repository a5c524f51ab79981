"""What a service's process needs: settings, signals, a bounded end."""

from triptych_common.runtime.drain import DRAINING_HEADER, DrainGate, DrainState
from triptych_common.runtime.listening import ListenError, bind_tcp
from triptych_common.runtime.media_settings import MediaSettings
from triptych_common.runtime.service import StopSignal, run_service
from triptych_common.runtime.settings import RunDirError, ServiceSettings, ensure_run_dir

__all__ = [
    "DRAINING_HEADER",
    "DrainGate",
    "DrainState",
    "ListenError",
    "MediaSettings",
    "RunDirError",
    "ServiceSettings",
    "StopSignal",
    "bind_tcp",
    "ensure_run_dir",
    "run_service",
]
