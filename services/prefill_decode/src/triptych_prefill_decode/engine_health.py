"""Detects an engine that hangs, and answers for one that has died.

vLLM reports a dead engine only when asked, and a hanging one never: its host would stay registered and chosen
by every gateway, and each request would wait until its deadline.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import orjson
from prometheus_client import REGISTRY, CollectorRegistry

from triptych_common.domain.errors import RequestError, TriptychError
from triptych_common.protocol.messages import ServingLoad
from triptych_common.runtime.drain import AsgiApp, Message, Receive, Scope, Send
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog

RUNNING, KV_USAGE = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"

log = get_logger(__name__)


class ServingLoadReader:
    """Load of the engine, for the instance's heartbeats; the host counts its unfinished requests itself.

    vLLM reports how many requests the engine computes, and how full its KV cache is, with each step, in its
    server's metrics.
    """

    def __init__(self, engine: Any, metrics: CollectorRegistry = REGISTRY) -> None:
        self._engine = engine
        self._metrics = metrics
        self._beats = count(1)

    def read_fields(self) -> dict[str, ServingLoad]:
        gauges = self._gauges()
        num_requests = self._engine.output_processor.get_num_unfinished_requests()
        num_running = min(num_requests, int(gauges.get(RUNNING, 0)))
        kv_usage = gauges.get(KV_USAGE)
        load = ServingLoad(
            num_beats=next(self._beats),
            num_running=num_running,
            num_waiting=num_requests - num_running,
            kv_usage=None if kv_usage is None else min(1.0, max(0.0, kv_usage)),
        )
        return {"load": load}

    def _gauges(self) -> dict[str, float]:
        """vLLM's gauges by name; empty if its statistics are off (`--disable-log-stats`)."""
        found = self._metrics.restricted_registry([RUNNING, KV_USAGE])
        return {sample.name: sample.value for family in found.collect() for sample in family.samples}


def kv_cache_tokens(vllm_config: Any) -> int | None:
    """Tokens that the engine's KV cache holds, as reported at its start."""
    cache = vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size or None


class DeadEngineMiddleware:
    """ASGI middleware that answers for a dead engine: 503, or a connection that breaks off.

    vLLM's own answer, 500 or an error event with `[DONE]`, hides that the engine has died. As long as no
    token is out, another instance can serve the request. The code tells the gateway whether the request may
    be at fault: `engine_died` if the engine died while it had the request, `engine_dead` if it had died
    before.

    Args:
        app: the application.
        is_dead: whether the engine is.
    """

    def __init__(self, app: AsgiApp, is_dead: Callable[[], bool]) -> None:
        self._app = app
        self._is_dead = is_dead

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun, came_late = False, self._is_dead()

        async def send_while_alive(message: Message) -> None:
            nonlocal has_begun
            if not self._is_dead():
                has_begun = True
                await send(message)

        try:
            await self._app(scope, receive, send_while_alive)
        except Exception as error:
            if has_begun or not self._is_dead():
                raise
            log.info("request failed: engine dead", error=repr(error))
        if not has_begun:
            await _answer_dead(send, "engine_dead" if came_late else "engine_died")
        # An answer that has begun breaks off: the server closes its connection.


async def _answer_dead(send: Send, code: str) -> None:
    body = orjson.dumps(RequestError(503, code, "the engine of this instance is dead").body())
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class EngineGoneError(TriptychError):
    """vLLM's engine is dead, or hangs: this process must be restarted."""


class AnsweringEngine(Protocol):
    """vLLM's `AsyncLLM`, as far as it is used here."""

    async def is_sleeping(self) -> bool:
        """A request that the engine answers between two steps, or at once when it has nothing to do."""
        ...


async def watch_answers(engine: AnsweringEngine, watchdog: EngineWatchdog, *, interval_s: float) -> None:
    """Ask the engine every `interval_s` seconds, until cancelled.

    Raises:
        TriptychError: `watchdog` finds that the engine hangs.
    """
    while True:
        await asyncio.sleep(interval_s)
        async with watchdog.waiting():
            await engine.is_sleeping()
