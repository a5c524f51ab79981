"""Between the server and whoever asks it for a process."""

from pydantic import BaseModel

MAX_REQUEST_BYTES = 1 << 18
MAX_FDS = 8


class Request(BaseModel):
    """To the server, with the descriptors of `numbers`."""

    server: str  # path of its socket
    module: str
    arguments: list[str]
    environment: dict[str, str]
    cwd: str
    numbers: list[int]  # that the descriptors get in the new process
    ends_with_caller: bool  # SIGTERM to it when the connection ends


class Forked(BaseModel):
    """From the server."""

    pid: int | None  # None: it is not forked
    differing: list[str]  # the reason: variables with other values than at the import


class Ended(BaseModel):
    """From the server, later."""

    exit_code: int  # negative: the signal
