"""Requests to a running supervisor, over a Unix socket in the run directory (private to its user).

One request per connection, one JSON object per line: a `ServicesRequest` in, `ServicesReport`s out. If the
client disconnects, the service at hand is finished and the next ones are left alone.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from triptych_cli.roles import Bounds
from triptych_cli.supervisor.service import RestartFailedError
from triptych_cli.supervisor.supervisor import ScalingFailedError, Supervisor

REQUEST_TIMEOUT_S = 5.0


class ServicesRequest(BaseModel):
    command: Literal["restart", "stop", "scale", "ping"]
    services: tuple[str, ...] = ()  # names of instances; to scale: of the stage
    bounds: tuple[int, int] | None = None  # fewest and most of the stage


class ServicesReport(BaseModel):
    """`restarting`, `starting` or `stopping` before each service; `done` or `failed` at the end."""

    kind: Literal["restarting", "starting", "stopping", "done", "failed"]
    service: str = ""
    message: str = ""


@asynccontextmanager
async def serving_requests(supervisor: Supervisor, path: Path) -> AsyncIterator[None]:
    """Serve requests during the block, one at a time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _carry_out(supervisor, reader, writer)
        except (OSError, TimeoutError, ValidationError):
            return  # disconnected, or sent no request within the limit
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()


async def _carry_out(
    supervisor: Supervisor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    async def report(report: ServicesReport) -> None:
        writer.write(report.model_dump_json().encode() + b"\n")
        await writer.drain()

    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        request = ServicesRequest.model_validate_json(await reader.readline())
    if request.command == "ping":
        await report(ServicesReport(kind="done"))
        return
    if supervisor.commands.locked():
        message = "services are being restarted, stopped or scaled already"
        await report(ServicesReport(kind="failed", message=message))
        return
    async with supervisor.commands:
        try:
            async with contextlib.aclosing(_steps(supervisor, request)) as steps:
                async for step in steps:
                    if reader.at_eof():
                        return
                    await report(step)
        except (RestartFailedError, ScalingFailedError) as error:
            await report(ServicesReport(kind="failed", message=str(error)))
        else:
            await report(ServicesReport(kind="done"))


async def _steps(supervisor: Supervisor, request: ServicesRequest) -> AsyncGenerator[ServicesReport, None]:
    """Carry out the request; yields a report before each step."""
    match request.command:
        case "scale":
            bounds = Bounds(*(request.bounds or (0, 0)))
            async for name, starts in supervisor.scale_stage(request.services[0], bounds):
                yield ServicesReport(kind="starting" if starts else "stopping", service=name)
        case "stop":
            async for name in supervisor.stop_services(request.services):
                yield ServicesReport(kind="stopping", service=name)
        case _:
            async for name in supervisor.restart_services(request.services):
                yield ServicesReport(kind="restarting", service=name)


def answers_ping(path: Path) -> bool:
    """True if the supervisor at `path` answers; a stopped (SIGSTOP) or hanging one does not."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(REQUEST_TIMEOUT_S)
            connection.connect(os.fspath(path))
            connection.sendall(ServicesRequest(command="ping").model_dump_json().encode() + b"\n")
            return bool(connection.recv(1))
    except OSError:
        return False


def request_services(
    path: Path,
    command: Literal["restart", "stop", "scale"],
    services: tuple[str, ...],
    bounds: Bounds | None = None,
) -> Iterator[ServicesReport]:
    """Reports of the supervisor at `path`, until the request is done.

    Raises:
        OSError: no supervisor accepts requests there.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(path))
        request = ServicesRequest(command=command, services=services, bounds=bounds)
        connection.sendall(request.model_dump_json().encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                yield ServicesReport.model_validate_json(line)
