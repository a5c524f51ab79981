"""The store is killed and comes back: no other service restarts, and no sealed item is encoded again."""

import json
import os
import signal
from types import ModuleType

import pytest

from tests.support.real.system import System, image_part
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}
RESTART_TIMEOUT_S = 30


def services(system: System) -> dict[str, dict[str, object]]:
    status = json.loads((system.run_dir / "supervisor.json").read_text())
    return {service["name"]: service for service in status["services"]}


def test_images_are_answered_after_the_store_was_killed(system: System, strips: ModuleType) -> None:
    known, fresh = strips.held_out_strips(2, seed=41)
    before_text = system.ask([image_part(known.png), QUESTION]).text
    before = services(system)
    os.kill(int(str(before["cache_store-0"]["pid"])), signal.SIGKILL)

    def is_back() -> bool:
        store = services(system)["cache_store-0"]
        return store["pid"] != before["cache_store-0"]["pid"] and store["state"] == "ready"

    wait_until(is_back, RESTART_TIMEOUT_S, "the store is ready again")
    again = system.ask([QUESTION, image_part(known.png)])
    names = {span.name for span in system.trace(again.request_id, "prefill.inject")}
    assert "encoder.encode" not in names
    assert again.text.split() == before_text.split()

    assert system.ask([image_part(fresh.png), QUESTION]).text
    wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
    after = services(system)
    unharmed = ("encoder-0", "prefill_decode-0", "gateway-0")
    assert {name: after[name]["pid"] for name in unharmed} == {name: before[name]["pid"] for name in unharmed}
