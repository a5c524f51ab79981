"""When a request that was sent without its tensors loses hope."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.encode import encode_wait
from triptych_gateway.encode.encode_wait import EncodeWait
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.openai_errors import EncodeUnavailableError

PATIENCE_S = 20.0


class View:
    """`RegistryView`: an encoder is there, and every look is a new one."""

    records: tuple[()] = ()

    async def wait_for_look(self) -> None:
        await asyncio.sleep(0)

    def has_encoder(self, digest: str) -> bool:
        return True


class Orders:
    """`EncodeOrders`: a job is always under way."""

    def awaits_job(self, ticket: MediaWait) -> bool:
        return True


async def test_the_patience_begins_anew_when_an_item_is_needed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_wait, "has_tower", lambda *args: True)
    ticket = MediaWait(RequestId("r"), "pd-0", (), time.monotonic() + 60, None, "d" * 64)
    settings: Any = SimpleNamespace(encoder_grace_s=10.0, local_encode_after_s=PATIENCE_S)
    view: Any = View()
    orders: Any = Orders()
    wait = EncodeWait(settings, view, orders, ticket, model="m", namespace_digest="d")
    wait._give_up_at = time.monotonic() - 1  # the request arrived long ago
    ticket.need_again(MmHash("a" * 64))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await wait.hopeless()
    ticket.needed_at -= PATIENCE_S
    with pytest.raises(EncodeUnavailableError):
        async with asyncio.timeout(5):
            await wait.hopeless()
