"""When a request that was sent without its tensors gives up."""

import asyncio
import time
from typing import Any

import pytest

from triptych_common.protocol.ids import MmHash, RequestId
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.errors import EncodeUnavailableError
from triptych_gateway.proxy import attempt
from triptych_gateway.proxy.attempt import EncodeWait
from triptych_gateway.settings import EncodeSettings

LOCAL_ENCODE_AFTER_S = 20.0


class View:
    """`RegistryView`: an encoder is there, and every read is a new one."""

    records: tuple[()] = ()

    async def wait_for_refresh(self) -> None:
        await asyncio.sleep(0)

    def has_encoder(self, digest: str) -> bool:
        return True


class Orders:
    """`EncodeOrders`: a job is always in flight."""

    def awaits_job(self, item_wait: ItemWait) -> bool:
        return True


def encode_wait(item_wait: ItemWait, view: Any, settings: EncodeSettings, **options: Any) -> EncodeWait:
    orders: Any = Orders()
    return EncodeWait(view, orders, item_wait, model="m", settings=settings, **options)


def new_item_wait() -> ItemWait:
    return ItemWait(RequestId("r"), "pd-0", (), time.monotonic() + 60, None, "d" * 64)


async def test_the_time_begins_anew_when_an_item_is_needed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "has_tower", lambda *args: True)
    item_wait = new_item_wait()
    wait = encode_wait(
        item_wait,
        View(),
        EncodeSettings(encoder_grace_s=10.0, local_encode_after_s=LOCAL_ENCODE_AFTER_S),
        began_at=time.monotonic() - LOCAL_ENCODE_AFTER_S - 1,  # the request arrived long ago
    )
    item_wait.on_needed_again(MmHash("a" * 64))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await wait.wait_given_up()
    item_wait.needed_at -= LOCAL_ENCODE_AFTER_S
    with pytest.raises(EncodeUnavailableError):
        async with asyncio.timeout(60):
            await wait.wait_given_up()


class ViewWithoutEncoder(View):
    def has_encoder(self, digest: str) -> bool:
        return False


@pytest.mark.parametrize("num_looks", [0, 3])
async def test_without_a_tower_it_gives_up_where_another_version_can_serve_it(num_looks: int) -> None:
    """It waits for an encoder as long as ever. The other version may come while it waits."""
    looks: list[bool] = []

    def may_go_elsewhere() -> bool:
        looks.append(len(looks) >= num_looks)
        return looks[-1]

    wait = encode_wait(
        new_item_wait(),
        ViewWithoutEncoder(),
        EncodeSettings(encoder_grace_s=0.05, local_encode_after_s=0.001),  # which is for towers
        may_go_elsewhere=may_go_elsewhere,
    )
    began_at = time.monotonic()
    async with asyncio.timeout(60):
        await wait.wait_given_up()
        with pytest.raises(EncodeUnavailableError) as caught:
            await wait.wait_left()
    assert caught.value.code == "no_encoder"
    assert time.monotonic() - began_at >= 0.05
