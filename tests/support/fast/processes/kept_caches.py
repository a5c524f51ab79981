"""The stand-in's KV caches on their way: kept where they were made, until they are read or the lease ends."""

import asyncio
from itertools import count
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from triptych_common.protocol.messages import KvTransfer

CONNECTOR = "FastConnector"
PATH = "/kv"


def kv_transfer(lease_s: float) -> KvTransfer:
    return KvTransfer(connector=CONNECTOR, compatibility="fast", lease_s=lease_s)


class KeptCaches:
    """Of one instance. A KV cache is the words that only who has read the items can make."""

    def __init__(self, instance: str, port: int, lease_s: float) -> None:
        self._instance, self._port, self._lease_s = instance, port, lease_s
        self._kept: dict[str, list[str]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, words: list[str]) -> dict[str, Any]:
        """What the one who decodes must show for it, once."""
        handle = f"{self._instance}-{next(self._numbers)}"
        self._kept[handle] = words
        asyncio.get_running_loop().call_later(self._lease_s, self._kept.pop, handle, None)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": handle,
            "remote_host": "127.0.0.1",
            "remote_port": self._port,
        }

    def router(self) -> APIRouter:
        router = APIRouter()

        @router.post(PATH + "/{handle}")
        async def take(handle: str) -> Response:
            words = self._kept.pop(handle, None)
            return JSONResponse({"words": words}, 404 if words is None else 200)

        return router
