"""Event cutter, error mapping, admission, API keys, media shelf, race, tickets."""

import asyncio
import hashlib

import orjson
import pytest
from pydantic import SecretStr

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import FailureKind
from triptych_gateway.access.admission import Admission
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.chat.race import race
from triptych_gateway.chat.sse import EventCutter, cut_at_error, error_in_first_event
from triptych_gateway.chat.upstream import upstream_error
from triptych_gateway.encode.item_table import ItemFailure
from triptych_gateway.encode.media_cache import MediaShelf
from triptych_gateway.encode.media_wait import error_for
from triptych_gateway.openai_errors import error_event, error_response

H = MmHash("a" * 64)


class TestEventCutter:
    def test_whole_events_pass_untouched(self) -> None:
        cutter = EventCutter()
        assert cutter.feed(b"data: 1\n\n") == b"data: 1\n\n"
        assert cutter.feed(b"data: 2\n\ndata: 3") == b"data: 2\n\n"
        assert cutter.feed(b"3\n") == b""
        assert not cutter.is_done
        assert cutter.feed(b"\ndata: [DONE]\n\n") == b"data: 33\n\ndata: [DONE]\n\n"
        assert cutter.is_done

    def test_every_way_of_cutting_gives_the_same_bytes(self) -> None:
        whole = b'data: {"a": "x"}\n\ndata: {"b": "[DONE]"}\n\ndata: [DONE]\n\n'
        for size in range(1, len(whole) + 1):
            cutter = EventCutter()
            passed = b"".join(cutter.feed(whole[at : at + size]) for at in range(0, len(whole), size))
            assert passed == whole
            assert cutter.is_done

    def test_done_inside_a_text_is_not_the_end(self) -> None:
        cutter = EventCutter()
        cutter.feed(b'data: {"text": "data: [DONE]"}\n\n')
        assert not cutter.is_done

    def test_first_event_that_is_an_error(self) -> None:
        assert error_in_first_event(b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n') == {
            "message": "x"
        }
        assert error_in_first_event(b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n') is None
        assert error_in_first_event(b"data: [DONE]\n\n") is None

    def test_events_up_to_an_error(self) -> None:
        token = b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n'
        other = b'data: {"choices": [], "error": null}\n\n'
        error = b'data: {"error": {"message": "x"}}\n\n'
        done = b"data: [DONE]\n\n"
        assert cut_at_error(token + other + done) == (token + other + done, None)
        assert cut_at_error(token + other + error + done) == (token + other, {"message": "x"})
        assert cut_at_error(error) == (b"", {"message": "x"})


class TestErrors:
    def test_format(self) -> None:
        response = error_response(RequestError(400, "c", "m", "messages[0]"))
        assert orjson.loads(response.body) == {
            "error": {"message": "m", "type": "invalid_request_error", "param": "messages[0]", "code": "c"}
        }
        assert "retry-after" not in response.headers

    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after(self, status: int) -> None:
        assert error_response(RequestError(status, "c", "m")).headers["retry-after"] == "1"
        assert error_response(RequestError(status, "c", "m", retry_after_s=2.5)).headers["retry-after"] == "3"

    def test_event(self) -> None:
        event = error_event(RequestError(503, "c", "m"))
        assert event.endswith(b"\n\n")
        assert error_in_first_event(event) is not None

    def test_upstream_client_errors_pass_server_errors_become_503(self) -> None:
        body = b'{"error": {"message": "max_tokens too large", "param": "max_tokens", "code": 400}}'
        error = upstream_error(400, body)
        assert (error.status_code, error.message, error.param, error.code) == (
            400,
            "max_tokens too large",
            "max_tokens",
            "invalid_request",
        )
        error = upstream_error(500, b"Traceback: secret path")
        assert error.status_code == 503
        assert "secret" not in error.message

    @pytest.mark.parametrize(
        ("kind", "status", "code"),
        [
            (FailureKind.BAD_MEDIA, 400, "invalid_image"),
            (FailureKind.TOO_LARGE, 413, "image_too_large"),
            (FailureKind.MEDIA_GONE, 503, "encode_failed"),
            (FailureKind.STORE_FULL, 503, "store_full"),
            (FailureKind.ENCODER_ERROR, 503, "encode_failed"),
            (FailureKind.EXPIRED, 503, "deadline_exceeded"),
            (FailureKind.DEAD_LETTER, 503, "encode_failed"),
            (None, 503, "bus_unavailable"),
        ],
    )
    def test_item_failures(self, kind: FailureKind | None, status: int, code: str) -> None:
        error = error_for(ItemFailure(kind, "detail"), "messages[0].content[1].image_url.url")
        assert (error.status_code, error.code) == (status, code)
        assert error.param == "messages[0].content[1].image_url.url"


class TestAdmission:
    def test_places_are_bounded_and_given_back(self) -> None:
        admission = Admission(max_requests=1, max_media_bytes=10)
        with admission.request():
            with pytest.raises(RequestError) as caught, admission.request():
                pass
            assert caught.value.status_code == 429
        assert admission.num_requests == 0

    def test_bytes_are_booked_as_they_come(self) -> None:
        admission = Admission(max_requests=1, max_media_bytes=10)
        with admission.media() as first, admission.media() as second:
            first.resize(4)
            first.resize(8)
            second.resize(2)
            with pytest.raises(RequestError) as caught:
                second.resize(3)
            assert (caught.value.status_code, caught.value.code) == (429, "too_much_media")
            assert admission.media_bytes == 10
            first.resize(5)
            second.resize(5)
        assert admission.media_bytes == 0

    def test_what_is_alone_may_be_as_large_as_a_body_may_be(self) -> None:
        admission = Admission(max_requests=1, max_media_bytes=10)
        with admission.media() as first, admission.media() as second:
            first.resize(20)
            with pytest.raises(RequestError):
                second.resize(1)
            first.resize(15)  # less than before, and still above the bound
        assert admission.media_bytes == 0


class TestApiKeys:
    def test_off_by_default(self) -> None:
        ApiKeys(()).check(None)

    def test_plain_and_hashed(self) -> None:
        keys = ApiKeys([SecretStr("one"), SecretStr("sha256:" + hashlib.sha256(b"two").hexdigest())])
        keys.check("Bearer one")
        keys.check("bearer two")
        for header in (None, "", "Bearer", "Bearer three", "Basic one"):
            with pytest.raises(RequestError) as caught:
                keys.check(header)
            assert caught.value.status_code == 401


class TestMediaShelf:
    def test_kept_while_anybody_holds_it(self) -> None:
        shelf = MediaShelf()
        token = shelf.put(H, b"x", RequestId("r1"))
        assert shelf.put(H, b"x", RequestId("r2")) == token
        assert len(token) >= 40
        shelf.release(H, RequestId("r1"))
        assert shelf.fetch(token) == b"x"
        shelf.release(H, RequestId("r2"))
        shelf.release(H, RequestId("r2"))
        assert shelf.fetch(token) is None
        assert len(shelf) == 0


class TestRace:
    async def test_result(self) -> None:
        assert await race(asyncio.sleep(0, 7), asyncio.sleep(10)) == 7

    async def test_guard_that_returns_has_no_say(self) -> None:
        assert await race(asyncio.sleep(0.01, 7), asyncio.sleep(0)) == 7

    async def test_guard_that_raises_cancels_the_work(self) -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(10)
            finally:
                ended.set()

        with pytest.raises(LookupError):
            await race(work(), fail())
        assert ended.is_set()

    async def test_work_that_raises(self) -> None:
        with pytest.raises(LookupError):
            await race(fail(), asyncio.sleep(10))

    async def test_cancelled_from_outside_leaves_no_task(self) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await race(asyncio.sleep(10), asyncio.sleep(10))
        assert len(asyncio.all_tasks()) == 1


async def fail() -> None:
    raise LookupError
