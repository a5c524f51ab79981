"""When tokens pass: first token, gaps, time per token, whole answer."""

import time
from collections.abc import Callable

import pytest

from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.proxy.sse import num_roles_in, num_tokens_in
from triptych_gateway.proxy.streaming import TokenTimes

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a \\"role\\" and \\"choices\\":[]"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
LABELS = {"route": "/v1/chat/completions", "model": "m", "modality": "image"}


class Times:
    """`TokenTimes` of a request that arrived at 10.0, on a clock of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, form: ChatForm = ChatForm.COMPLETIONS) -> None:
        self.now = 10.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.metrics = GatewayMetrics()
        series = self.metrics.latencies.of(*LABELS.values())
        self.times = TokenTimes(series, 10.0, form)

    def at(self, now: float, step: Callable[[], None]) -> None:
        self.now = now
        step()

    def value(self, name: str) -> float | None:
        return self.metrics.metrics.registry.get_sample_value(f"triptych_gateway_{name}", LABELS)


@pytest.mark.parametrize(
    ("events", "num_tokens"),
    [
        (ROLE, 0),
        (TOKEN, 1),
        (USAGE, 0),
        (DONE, 0),
        (b"", 0),
        (TOKEN + USAGE, 1),
        (USAGE.replace(b"}}\n", b'},"system_fingerprint":"x"}\n'), 0),  # as vLLM sends it
        (ROLE + TOKEN * 3 + USAGE + DONE, 3),
    ],
)
def test_tokens_are_counted_by_their_events(events: bytes, num_tokens: int) -> None:
    assert num_tokens_in(events) - num_roles_in(events) == num_tokens


def test_a_streams_times(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Times(monkeypatch)
    it.at(10.5, lambda: it.times.on_events(ROLE))  # no token yet
    it.at(11.0, lambda: it.times.on_events(TOKEN))
    it.at(11.2, lambda: it.times.on_events(TOKEN))
    it.at(11.8, lambda: it.times.on_events(TOKEN + TOKEN + USAGE + DONE))  # the last two came together
    it.at(12.0, it.times.on_end)
    assert it.value("time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert it.value("inter_token_latency_seconds_count") == 3
    assert it.value("inter_token_latency_seconds_sum") == pytest.approx(0.2 + 0.6 + 0.0)
    assert it.value("request_time_per_output_token_seconds_sum") == pytest.approx(0.8 / 3)
    assert it.value("e2e_request_latency_seconds_sum") == pytest.approx(2.0)


def test_a_whole_answer_shows_its_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Times(monkeypatch)
    it.at(13.0, it.times.on_end)
    assert it.value("e2e_request_latency_seconds_sum") == pytest.approx(3.0)
    for name in ("time_to_first_token", "inter_token_latency", "request_time_per_output_token"):
        assert it.value(f"{name}_seconds_count") == 0


def test_one_token_has_no_time_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Times(monkeypatch)
    it.at(11.0, lambda: it.times.on_events(TOKEN))
    it.at(11.0, it.times.on_end)
    assert it.value("request_time_per_output_token_seconds_count") == 0


CREATED = b'event: response.created\ndata: {"response":{"output":[]}}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"a \\n.delta\\ndata:"}\n\n'
CALL = b'event: response.function_call_arguments.delta\ndata: {"delta":"{"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"response":{}}\n\n'


def test_tokens_of_named_events_are_their_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [
        num_tokens_in(each, ChatForm.RESPONSES) for each in (CREATED, DELTA, CALL, COMPLETED, DELTA * 3)
    ] == [0, 1, 1, 0, 3]
    it = Times(monkeypatch)
    times = TokenTimes(it.metrics.latencies.of(*LABELS.values()), 10.0, ChatForm.RESPONSES)
    it.at(10.2, lambda: times.on_events(CREATED * 2))
    it.at(10.5, lambda: times.on_events(DELTA))
    it.at(10.8, lambda: times.on_events(CALL + COMPLETED))
    it.at(11.0, times.on_end)
    assert it.value("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert it.value("inter_token_latency_seconds_count") == 1


def test_tokens_of_the_messages_api_are_its_deltas() -> None:
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":%s}\n\n'
    text = delta % b'{"type":"text_delta","text":"\\"type\\":\\"content_block_delta\\""}'
    signature = delta % b'{"type":"signature_delta","signature":"x"}'
    start = b'event: message_start\ndata: {"type":"message_start","message":{"role":"assistant"}}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    for events, num_tokens in ((start, 0), (text, 1), (start + text * 3 + signature + stop, 3), (stop, 0)):
        assert num_tokens_in(events, ChatForm.MESSAGES) == num_tokens


def test_the_first_token_of_the_messages_api(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Times(monkeypatch, ChatForm.MESSAGES)
    start = b'event: message_start\ndata: {"type":"message_start","message":{"role":"assistant"}}\n\n'
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{}}\n\n'
    it.at(10.5, lambda: it.times.on_events(start))
    it.at(11.0, lambda: it.times.on_events(delta))
    it.at(11.5, lambda: it.times.on_events(delta))
    assert it.value("time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert it.value("inter_token_latency_seconds_sum") == pytest.approx(0.5)
