"""Uploads by the openai client, and what is on the disk afterwards."""

from pathlib import Path
from typing import Any

from openai.types import FileObject

from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System


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
    return float(system.gateway.chat.metrics.files_encoded_ahead.labels(outcome)._value.get())
