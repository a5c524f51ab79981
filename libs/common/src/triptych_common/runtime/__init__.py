"""Process of a service: settings, signals, a bounded end.

settings        what every service reads from `TRIPTYCH_*` and its command line; `media_settings` for media
scrape_server   metrics over HTTP, on a listener of their own
config_file       one YAML file, which they override
yaml_file       reads a file that an operator has written
secret_files    reads one that its owner alone can read, and keys
service         runs a service until a signal; the second signal ends it at once
liveness        whether a process hangs, or is slow; healthcheck: ends one in a container that hangs
listening       binds the TCP port before anything expensive is started
drain           the gate of an HTTP service that ends (the machine `DrainState`)
"""

from triptych_common.runtime.drain import DRAINING_HEADER, DrainGate, DrainState
from triptych_common.runtime.listening import ListenError, bind_tcp
from triptych_common.runtime.media_settings import DecodingSettings, MediaSettings
from triptych_common.runtime.scrape_server import MetricsSettings
from triptych_common.runtime.service import StopSignal, run_service
from triptych_common.runtime.settings import RunDirError, ServiceSettings, ensure_run_dir

__all__ = [
    "DRAINING_HEADER",
    "DecodingSettings",
    "DrainGate",
    "DrainState",
    "ListenError",
    "MediaSettings",
    "MetricsSettings",
    "RunDirError",
    "ServiceSettings",
    "StopSignal",
    "bind_tcp",
    "ensure_run_dir",
    "run_service",
]
