"""Requests to a running supervisor, over a Unix socket in the run directory (which is its user's alone).

One request per connection, one JSON object per line: a `RestartRequest` in, `RestartReport`s out. When the
client disconnects, the service at hand is finished and the next ones are left alone.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from triptych_cli.supervisor.service import RestartFailedError
from triptych_cli.supervisor.supervisor import Supervisor

REQUEST_TIMEOUT_S = 5.0


class RestartRequest(BaseModel):
    services: tuple[str, ...]  # names of instances


class RestartReport(BaseModel):
    """`restarting` before each service; `done` or `failed` at the end."""

    kind: Literal["restarting", "done", "failed"]
    service: str = ""
    message: str = ""


@asynccontextmanager
async def serving_requests(supervisor: Supervisor, path: Path) -> AsyncIterator[None]:
    """Requests are served inside the block, one at a time."""
    busy = asyncio.Lock()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _restart(supervisor, busy, reader, writer)
        except (OSError, TimeoutError, ValidationError):
            return  # disconnected, or sent no request within the limit
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()


async def _restart(
    supervisor: Supervisor, busy: asyncio.Lock, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    async def report(report: RestartReport) -> None:
        writer.write(report.model_dump_json().encode() + b"\n")
        await writer.drain()

    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        request = RestartRequest.model_validate_json(await reader.readline())
    if busy.locked():
        await report(RestartReport(kind="failed", message="services are being restarted already"))
        return
    async with busy:
        try:
            async with contextlib.aclosing(supervisor.restart_services(request.services)) as names:
                async for name in names:
                    if reader.at_eof():
                        return
                    await report(RestartReport(kind="restarting", service=name))
        except RestartFailedError as error:
            await report(RestartReport(kind="failed", message=str(error)))
        else:
            await report(RestartReport(kind="done"))


def request_restart(path: Path, services: tuple[str, ...]) -> Iterator[RestartReport]:
    """The reports of the supervisor at `path`, until the restarts end.

    Raises:
        OSError: no supervisor accepts requests there.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(path))
        connection.sendall(RestartRequest(services=services).model_dump_json().encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                yield RestartReport.model_validate_json(line)
