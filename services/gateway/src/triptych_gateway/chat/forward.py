"""A prepared request goes to prefill_decode, its answer to the client.

An instance that cannot be reached, or goes away before its first chunk, costs the caller nothing
but time: another one is tried.
"""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import current_traceparent, get_logger, span
from triptych_gateway.chat.choice import Choice
from triptych_gateway.chat.streaming import ClientStream, relay_stream
from triptych_gateway.chat.upstream import Answer, DrainingError, UnreachableError, open_answer
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.gateway import Gateway
from triptych_gateway.openai_errors import unavailable

log = get_logger(__name__)

ITEM_FAILURE_GRACE_S = 0.1


@dataclass
class Dispatch:
    """What is sent, and how."""

    request_id: RequestId
    model: str
    stream: bool
    namespace_digest: str | None  # None: text only, any namespace
    body: bytes
    response_headers: dict[str, str]
    arrived_at: float  # monotonic seconds
    first_token_deadline: float  # monotonic seconds; streamed requests only
    has_media: bool = False
    needs_tower: bool = False  # the media are sent raw
    ticket: MediaWait | None = None  # the media are sent as metadata
    first_choice: InstanceRecord | None = None


async def serve(gateway: Gateway, dispatch: Dispatch, client: ClientStream) -> None:
    """Send, wait for the first chunk, relay to the end.

    Raises:
        RequestError: whatever went wrong; `client.has_begun` says whether it must go into the stream.
    """
    choice = Choice(
        gateway,
        dispatch.model,
        dispatch.namespace_digest,
        dispatch.first_choice,
        needs_tower=dispatch.needs_tower,
    )
    async with AsyncExitStack() as held:
        with span("gateway.first_token") as waiting:
            while True:
                record = await choice.next()
                try:
                    answer = await _begin(gateway, dispatch, record, held)
                    if dispatch.ticket is not None:
                        dispatch.ticket.settle()
                    break
                except DrainingError:
                    log.info(
                        "prefill_decode is draining", instance=record.instance, request_id=dispatch.request_id
                    )
                    choice.refused()
                except UnreachableError as error:
                    log.warning(
                        "prefill_decode not reachable",
                        instance=record.instance,
                        error=str(error),
                        request_id=dispatch.request_id,
                    )
                    choice.failed(record)
            waiting.set_attribute("triptych.prefill_decode", record.instance)
        await _relay(gateway, dispatch, answer, client)
        if dispatch.ticket is not None:
            dispatch.ticket.answered_by = record.instance


async def _begin(
    gateway: Gateway, dispatch: Dispatch, record: InstanceRecord, held: AsyncExitStack
) -> Answer:
    """The answer at its first chunk. `held` keeps it open; on failure nothing stays open."""
    headers: dict[str, str] = {"X-Request-Id": dispatch.request_id}
    traceparent = current_traceparent()
    if traceparent is not None:
        headers["traceparent"] = traceparent
    async with AsyncExitStack() as trial:
        gateway.router.begin(record.instance)
        trial.callback(gateway.router.end, record.instance)
        try:
            # Only a stream shows its first token; a whole answer is bound by the request's own limit.
            async with asyncio.timeout(
                dispatch.first_token_deadline - time.monotonic() if dispatch.stream else None
            ):
                answer = await trial.enter_async_context(
                    open_answer(
                        gateway.http, record.url or "", dispatch.body, headers, stream=dispatch.stream
                    )
                )
        except TimeoutError as error:
            raise RequestError(504, "deadline_exceeded", "no token came in time") from error
        except RequestError as error:
            await _prefer_item_failure(dispatch, error)
            raise
        held.push_async_exit(trial.pop_all())
        return answer


async def _prefer_item_failure(dispatch: Dispatch, error: RequestError) -> None:
    """When prefill_decode gave up because an item failed, the item's failure is the better answer.

    Both come from the same event by different ways; the one over the bus may be a little later. And
    prefill_decode gives up by itself what still waits for an item at the deadline that it was told.
    """
    if dispatch.ticket is None or error.status_code < 500:
        return
    if time.monotonic() >= dispatch.ticket.deadline:
        raise unavailable("deadline_exceeded", "the media were not there in time") from error
    try:
        async with asyncio.timeout(ITEM_FAILURE_GRACE_S):
            await dispatch.ticket.wait_failure()
    except TimeoutError:
        return


async def _relay(gateway: Gateway, dispatch: Dispatch, answer: Answer, client: ClientStream) -> None:
    headers = dispatch.response_headers
    if not dispatch.stream:
        await client.begin(
            200, {**headers, "Content-Type": answer.content_type, "Content-Length": str(len(answer.first))}
        )
        await client.end(answer.first)
        return
    kind = "image" if dispatch.has_media else "none"
    gateway.metrics.first_token_s.labels(kind).observe(time.monotonic() - dispatch.arrived_at)
    with span("gateway.stream") as streaming:
        num_chunks = await relay_stream(answer, client, headers, gateway.settings.chunk_timeout_s)
        streaming.set_attribute("triptych.num_chunks", num_chunks)
