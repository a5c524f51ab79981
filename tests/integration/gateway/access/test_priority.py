"""Priorities of API keys, as prefill_decode gets them."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, entry, image_part, write_keys
from tests.support.gateway.system import opened_system
from triptych_common.protocol.messages import EncodeClass
from triptych_gateway.encode.item_queue import ItemQueue

IMAGE = image_part(7)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [IMAGE]}]},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "a"}]]},
    "/v1/completions": {"prompt": "a", "stream": True},
    "/v1/embeddings": {"input": "a"},
}


async def test_a_keys_priority_is_what_its_requests_have_at_most(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the model computes something; a key without one sends what it likes."""
    orders: list[EncodeClass] = []
    add_item = ItemQueue.add_item

    def noting(self: ItemQueue, *args: Any, **options: Any) -> None:
        if options.get("request"):
            orders.append(options["place"].fair_key.encode_class)
        add_item(self, *args, **options)

    monkeypatch.setattr(ItemQueue, "add_item", noting)
    keys = write_keys(tmp_path / "keys.toml", entry("late", "one", priority=7), entry("any", "two"))
    fake = FakePrefillDecode(pools=True)
    async with opened_system(redis_url, tmp_path, fake, api_keys_file=keys) as system:

        async def sent(key: str, path: str, **fields: Any) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await system.http.post(
                path, json={"model": MODEL, **BODIES[path], **fields}, headers=headers
            )
            assert answer.status_code == 200, answer.text
            return fake.bodies[-1].get("priority")

        for path in BODIES:
            got = [await sent("one", path), await sent("one", path, priority=-3)]
            got += [await sent("one", path, priority=9), await sent("two", path, priority=-3)]
            got.append(await sent("two", path))
            assert got == [7, 7, 9, -3, None], path
        assert orders == [EncodeClass.BATCH], "the image is encoded once"
        message = {"role": "user", "content": "a"}
        answer = await system.http.post(
            "/v1/messages",
            json={"model": MODEL, "max_tokens": 3, "messages": [message]},
            headers={"x-api-key": "one"},
        )
        assert answer.status_code == 200
        assert fake.headers[-1]["x-vllm-priority"] == "7", "vLLM has no field for it there"
        answer = await system.http.post(
            "/tokenize",
            json={"model": MODEL, "prompt": "a", "priority": -3},
            headers={"Authorization": "Bearer one"},
        )
        assert answer.status_code == 200
        assert fake.tokenized[-1]["priority"] == -3, "nothing is computed"
