"""What could not be encoded in time is refused at once; what was let in is answered."""

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway.samples import DIGEST, MODEL, data_url, entry, image_bytes, write_keys
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_common.protocol.messages import Modality
from triptych_gateway.encode.encode_admission import NUM_PROBES
from triptych_gateway.encode.encode_backlog import FIRST_PACE, NUM_KEPT, EncodeBacklog, EncodeWork

KEYS = (entry("flood", "key-flood"), entry("one", "key-one"))
SIDE = 64
IMAGE_S = 1.0  # as the gateway has measured it
NUM_FLOOD = 40
MAX_AGE_S = 10.0


def know_speed(system: System, encode_s: float = IMAGE_S) -> None:
    backlog = system.gateway.orders.admission.backlog
    for _ in range(NUM_KEPT):
        backlog.observe(
            DIGEST, EncodeWork(Modality.IMAGE, round(2 * math.log2(SIDE * SIDE))), encode_s / FIRST_PACE
        )


def opened(redis_url: str, folder: Path, **changes: Any) -> Any:
    keys = write_keys(folder / "keys.toml", *KEYS)
    changes = {"max_queue_age_s": MAX_AGE_S, "first_token_timeout_s": 20.0} | changes
    return opened_system(redis_url, folder, api_keys_file=keys, **changes)


async def ask(system: System, key: str, *numbers: int) -> httpx.Response:
    pngs = [image_bytes(each, size=(SIDE, SIDE)) for each in numbers]
    images = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in pngs]
    return await system.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": images}]},
        headers={"Authorization": f"Bearer key-{key}"},
    )


def num_ordered(system: System) -> int:
    return sum(item.in_flight for item in system.gateway.orders.table)


async def test_what_cannot_be_encoded_in_time_is_refused_at_once_and_the_rest_answered(
    redis_url: str, tmp_path: Path
) -> None:
    async with opened(redis_url, tmp_path) as system:
        await until(lambda: system.gateway.view.encoding)
        know_speed(system)
        system.encoder.before_start.clear()  # nothing is encoded
        asked = [asyncio.ensure_future(ask(system, "flood", number)) for number in range(NUM_FLOOD)]
        await until(lambda: sum(each.done() for each in asked) + num_ordered(system) == NUM_FLOOD)
        refused = [each.result() for each in asked if each.done()]
        assert len(refused) in range(NUM_FLOOD - 13, NUM_FLOOD - 9), "about 10 s of it were let in"
        assert {each.status_code for each in refused} == {429}
        assert {each.json()["error"]["code"] for each in refused} == {"encode_queue_slow"}
        assert {each.json()["error"]["type"] for each in refused} == {"rate_limit_error"}
        times = sorted(int(each.headers["retry-after"]) for each in refused)
        assert times[0] <= 2, times
        assert times[-1] in range(len(refused) - 3, len(refused) + 3), "one behind the other"
        of_another = asyncio.ensure_future(ask(system, "one", 99))
        await until(lambda: num_ordered(system) == NUM_FLOOD - len(refused) + 1)
        system.encoder.before_start.set()
        answers = [each for each in await asyncio.gather(*asked) if each.status_code != 429]
        assert Counter(each.status_code for each in answers) == {200: NUM_FLOOD - len(refused)}
        assert (await of_another).status_code == 200
        # an answer may end before its encode's result is read
        await until(lambda: not len(system.gateway.orders.admission.backlog))
        assert (await ask(system, "flood", NUM_FLOOD - 1)).status_code == 200, "there is room again"


async def test_a_request_is_refused_whole_and_nothing_of_it_is_ordered(
    redis_url: str, tmp_path: Path
) -> None:
    async with opened(redis_url, tmp_path) as system:
        await until(lambda: system.gateway.view.encoding)
        know_speed(system, 2.0)
        system.encoder.before_start.clear()
        first = asyncio.ensure_future(ask(system, "flood", 0, 1))
        await until(lambda: num_ordered(system) == 2)
        many = await ask(system, "flood", *range(2, 10))
        assert many.status_code == 429
        assert many.json()["error"]["param"] == "messages[0].content[0].image_url.url"
        assert num_ordered(system) == 2
        joined = asyncio.ensure_future(ask(system, "flood", 0, 1))
        await until(lambda: len(system.gateway.orders._item_waits) == 2)
        system.encoder.before_start.set()
        assert (await first).status_code == 200
        assert (await joined).status_code == 200, "items in flight cost nothing"
        assert (await ask(system, "flood", *range(2, 10))).status_code == 200, "an idle encoder takes any"


async def test_while_no_speed_is_known_a_flood_waits_for_the_first_encodes(
    redis_url: str, tmp_path: Path
) -> None:
    async with opened(redis_url, tmp_path) as system:
        await until(lambda: system.gateway.view.encoding)
        system.gateway.orders.admission.backlog = EncodeBacklog()
        system.encoder.before_start.clear()
        asked = [asyncio.ensure_future(ask(system, "flood", number)) for number in range(NUM_FLOOD)]
        await until(lambda: len(system.gateway.orders._item_waits) == NUM_FLOOD)
        await until(lambda: num_ordered(system) == NUM_PROBES)
        assert len(system.gateway.orders.admission.backlog) == NUM_PROBES
        know_speed(system)
        system.encoder.before_start.set()
        found = Counter(each.status_code for each in await asyncio.gather(*asked))
        assert found[200] >= NUM_PROBES
        assert found[200] + found[429] == NUM_FLOOD
