"""The comparison's proxy, client and turns against stand-ins for vLLM's servers. No times asserted."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from comparison.arms import ARMS
from comparison.bars import verdicts
from comparison.exactness import compare_tokens
from comparison.measuring import Plan, measure
from comparison.model_shapes import SCALES, Scale
from comparison.report import bars_table, medians_table, ratios_table
from comparison.serial_proxy import new_app
from comparison.stages import stage_times
from comparison.systems import RunningSystem
from comparison.workloads import WORKLOADS
from load.client import Endpoint, Question, ask, new_session
from load.contents import TextMaker
from load.figures import Objectives

MODEL = Path(__file__).resolve().parents[3] / "models" / "digits-vl"
SMALL = Scale("m", SCALES["s"].text, SCALES["s"].tower, 56, 1.0, 1.0)


@dataclass
class FakeVllm:
    """Answers chats: as an encoder with metadata, else with tokens 0, 1, 2 …; keeps what it was asked."""

    fails: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        if self.fails:
            return web.json_response({"error": {"message": "no"}}, status=500)
        if not body.get("stream"):
            (part,) = body["messages"][0]["content"]
            item = {"item_indices": [0], "metadata": {"image_grid_thw": [[1, 4, 4]]}}
            return web.json_response({"choices": [], "ec_transfer_params": {part["uuid"]: item}})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for token in range(body["max_tokens"]):
            event = {"choices": [{"delta": {"content": "a"}, "token_ids": [token]}]}
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    async with TestServer(app) as server:
        yield str(server.make_url("/v1"))


def app_of(fake: FakeVllm) -> web.Application:
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", fake.chat)
    return app


@asynccontextmanager
async def serial(encoder: FakeVllm, prefill_decode: FakeVllm) -> AsyncIterator[str]:
    async with (
        served(app_of(encoder)) as encoder_url,
        served(app_of(prefill_decode)) as url,
        served(new_app((encoder_url,), url)) as proxy_url,
    ):
        yield proxy_url


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}


async def test_images_are_encoded_before_prefill_gets_their_metadata() -> None:
    encoder, prefill_decode = FakeVllm(), FakeVllm()
    text = {"type": "text", "text": "read"}
    question = Question("image", [{"role": "user", "content": [image("a"), text, image("b")]}], 3)
    async with serial(encoder, prefill_decode) as url, new_session() as session:
        answer = await ask(Endpoint(url, "model", session), question)
    assert answer.error == ""
    assert answer.token_ids == [0, 1, 2]
    assert answer.encode_ms is not None
    assert len(encoder.asked) == 2
    (forwarded,) = prefill_decode.asked
    parts = forwarded["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_embeds", "text", "image_embeds"]
    assert parts[0]["image_embeds"] == {"image_grid_thw": [1, 4, 4]}
    uuids = {body["messages"][0]["content"][0]["uuid"] for body in encoder.asked}
    assert {parts[0]["uuid"], parts[2]["uuid"]} == uuids


@pytest.mark.parametrize("is_encoder", [True, False])
async def test_a_failure_is_in_the_answer(is_encoder: bool) -> None:
    encoder, prefill_decode = FakeVllm(fails=is_encoder), FakeVllm(fails=not is_encoder)
    async with serial(encoder, prefill_decode) as url, new_session() as session:
        question = Question("image", [{"role": "user", "content": [image("a")]}], 2)
        answer = await ask(Endpoint(url, "model", session), question)
    assert answer.error.startswith("502" if is_encoder else "500")


async def test_arms_take_turns_and_the_report_names_them() -> None:
    encoder, prefill_decode, whole = FakeVllm(), FakeVllm(), FakeVllm()
    names = ["one_image", "multi_turn", "mixed", "saturation_mixed"]
    plan = Plan(
        SMALL,
        [WORKLOADS[name] for name in names],
        2,
        1,
        Objectives(1e6, 1e6),
        TextMaker(MODEL),
        0.3,
        num_warm_up=0,
    )
    async with serial(encoder, prefill_decode) as url, served(app_of(whole)) as whole_url:
        systems = [
            RunningSystem(ARMS["monolith"], whole_url, "model", {"monolith": os.getpid()}),
            RunningSystem(
                ARMS["serial"], url, "model", {"proxy": os.getpid()}, outside_vllm=frozenset({"proxy"})
            ),
        ]
        async with asyncio.timeout(60):
            measured = await measure(systems, plan)
    assert measured.failures == []
    for name in names:
        assert [len(measured.figures[name][arm]) for arm in ("monolith", "serial")] == [2, 2]
    exact = compare_tokens(measured.tokens, "monolith")["serial"]
    assert exact.num_compared == exact.num_equal > 0
    assert stage_times(measured).encode_one > 0
    arms = ["monolith", "serial"]
    for text in (medians_table(measured, arms), ratios_table(measured, arms, "monolith")):
        assert "one_image: image.ttft_ms" in text
    assert "were not measured" in bars_table(verdicts(measured, "m"))
