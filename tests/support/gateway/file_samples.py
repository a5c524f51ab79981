"""Uploads by the openai client and by hand, and what is on the disk afterwards."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from openai.types import FileObject

from tests.support.gateway.samples import MODEL, image_bytes
from tests.support.gateway.system import System
from tests.support.waiting import until

IMAGE = image_bytes(7)
BITMAP = image_bytes(7, image_format="BMP")  # 1142 bytes, and the form's
ALICE = {"Authorization": "Bearer key-alice"}
BOUNDARY = "b" * 20


async def upload(
    system: System, content: bytes, *, key: str = "key-alice", name: str = "a.png", **options: Any
) -> FileObject:
    """One upload."""
    client = system.openai.with_options(api_key=key)
    return await client.files.create(file=(name, content), **({"purpose": "vision"} | options))


async def ask(system: System, content: Any, key: str = "key-alice") -> str:
    """The text of one answer."""
    client = system.openai.with_options(api_key=key)
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}]
    )
    return str(answer.choices[0].message.content)


def file_part(file_id: str) -> dict[str, Any]:
    """As the chat completions of OpenAI name a file."""
    return {"type": "file", "file": {"file_id": file_id}}


def stored(system: System) -> list[Path]:
    """All that the directory holds but its lock."""
    root = system.gateway.settings.files_dir
    assert root is not None
    return sorted(path for path in root.rglob("*") if path.is_file() and path.name != "lock")


def num_ahead(system: System, outcome: str) -> float:
    """Files whose encode-ahead came to this."""
    return float(system.gateway.services.metrics.files_encoded_ahead.labels(outcome)._value.get())


def multipart(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """A body of parts: the rest of the disposition, and the content."""
    body = b"".join(
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {rest}\r\n\r\n".encode() + content + b"\r\n"
        for rest, content in parts
    )
    return body + (f"--{BOUNDARY}--\r\n".encode() if end else b"")


PURPOSE = ('name="purpose"', b"vision")
FILE = ('name="file"; filename="a.png"', IMAGE)
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", **ALICE}


async def post(system: System, body: Any, headers: dict[str, str] = FORM) -> httpx.Response:
    return await system.http.post("/v1/files", content=body, headers=headers)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


class Held:
    """An upload whose body stops in the middle, until `go`."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.go = asyncio.Event()

    async def __aenter__(self) -> "Held":
        self._task = asyncio.get_running_loop().create_task(post(self._system, self._pieces()))
        await until(lambda: any(path.suffix == ".part" for path in stored(self._system)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _pieces(self) -> Any:
        body = multipart(PURPOSE, FILE)
        yield body[:150]
        await self.go.wait()
        yield body[150:]

    async def answer(self) -> httpx.Response:
        return await self._task
