"""Files on real engines: sent once, encoded before a request, answered as by data URL, over a restart."""

from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from tests.support.real.gateways import another_gateway
from tests.support.real.system import Answer, System, image_part
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

SEALED_LIMIT_S = 20
QUESTIONS = ("read the digits", "which digits are these?", "what stands here?")


def ask(gateway: System, part: dict[str, Any], question: str) -> tuple[Answer, set[str]]:
    """The answer, and the stages that it went through."""
    answer = gateway.ask([part, {"type": "text", "text": question}], stream=True)
    spans = gateway.trace(answer.request_id, "llm_request", "gateway.stream")
    return answer, {span.name for span in spans}


def test_one_upload_and_one_encode_over_a_restart(system: System, strips: ModuleType, tmp_path: Path) -> None:
    (strip,) = strips.held_out_strips(1, seed=71)
    wait_until(lambda: system.store_stats().num_pins == 0, SEALED_LIMIT_S, "earlier pins end")
    sealed = system.store_stats().num_seals_total
    name, files = "gateway-files", {"TRIPTYCH_FILES_DIR": str(tmp_path / "files")}
    asked: list[tuple[Answer, set[str]]] = []
    with another_gateway(system, name, **files) as gateway:
        with gateway.openai as client:
            file = client.files.create(file=("strip.png", strip.png), purpose="vision")
            assert client.files.content(file.id).read() == strip.png
        wait_until(
            lambda: system.store_stats().num_seals_total == sealed + 1, SEALED_LIMIT_S, "it is encoded ahead"
        )
        # The gateway acks in the place of an instance that never gets a request.
        wait_until(lambda: system.store_stats().num_pins == 0, SEALED_LIMIT_S, "the encoder's pin ends")
        part = {"type": "file", "file": {"file_id": file.id}}
        asked += [ask(gateway, part, question) for question in QUESTIONS[:2]]
    with another_gateway(system, name, **files) as gateway:
        asked.append(ask(gateway, part, QUESTIONS[2]))
        with gateway.openai as client:
            assert client.files.delete(file.id).deleted
    assert system.store_stats().num_seals_total == sealed + 1
    for _, stages in asked:
        assert not [stage for stage in stages if stage.startswith("encoder.")], stages
    expected = [system.ask([image_part(strip.png), {"type": "text", "text": text}]) for text in QUESTIONS]
    assert [answer.token_ids for answer, _ in asked] == [answer.token_ids for answer in expected]
    assert system.store_stats().num_seals_total == sealed + 1  # the same item by data URL


def test_an_item_named_by_uuid_is_encoded_once_and_answered_as_if_sent(
    system: System, strips: ModuleType
) -> None:
    first, second = strips.held_out_strips(2, seed=73)
    texts = [{"type": "text", "text": text} for text in QUESTIONS]
    sealed = system.store_stats().num_seals_total
    system.ask(
        [{**image_part(second.png), "uuid": "second"}, {**image_part(first.png), "uuid": "first"}, texts[0]]
    )
    wait_until(lambda: system.store_stats().num_seals_total == sealed + 2, SEALED_LIMIT_S, "both are encoded")
    names = [{"type": "image_url", "image_url": None, "uuid": uuid} for uuid in ("first", "second")]
    for name, strip, text in zip(names, (first, second), texts[1:], strict=True):
        answer, stages = ask(system, name, text["text"])
        assert not [stage for stage in stages if stage.startswith("encoder.")], stages
        assert answer.token_ids == system.ask([image_part(strip.png), text]).token_ids
    both = system.ask([*names, texts[0]])
    assert both.token_ids == system.ask([image_part(first.png), image_part(second.png), texts[0]]).token_ids
    assert system.store_stats().num_seals_total == sealed + 2
    with pytest.raises(openai.BadRequestError) as raised:
        system.ask([{**names[0], "uuid": "third"}, texts[0]])
    assert raised.value.code == "unknown_item"
