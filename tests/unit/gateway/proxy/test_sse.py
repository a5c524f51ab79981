"""Server-sent events: whole ones only, and the errors among them."""

from triptych_gateway.endpoints.endpoint import ChatForm
from triptych_gateway.proxy.sse import EventCutter, cut_at_error, error_in_first_event


def test_every_way_of_cutting_gives_the_same_bytes() -> None:
    whole = b'data: {"a": "x"}\n\ndata: {"b": "[DONE]"}\n\ndata: [DONE]\n\n'
    for size in range(1, len(whole) + 1):
        cutter = EventCutter()
        passed = b"".join(cutter.feed(whole[at : at + size]) for at in range(0, len(whole), size))
        assert passed == whole
        assert cutter.is_done


def test_done_inside_a_text_is_not_the_end() -> None:
    cutter = EventCutter()
    cutter.feed(b'data: {"text": "data: [DONE]"}\n\n')
    assert not cutter.is_done


def test_first_event_that_is_an_error() -> None:
    assert error_in_first_event(b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n') == {"message": "x"}
    assert error_in_first_event(b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n') is None
    assert error_in_first_event(b"data: [DONE]\n\n") is None


def test_events_up_to_an_error() -> None:
    token = b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}\n\n'
    other = b'data: {"choices": [], "error": null}\n\n'
    error = b'data: {"error": {"message": "x"}}\n\n'
    done = b"data: [DONE]\n\n"
    assert cut_at_error(token + other + done) == (token + other + done, None)
    assert cut_at_error(token + other + error + done) == (token + other, {"message": "x"})
    assert cut_at_error(error) == (b"", {"message": "x"})


def test_named_events_end_with_the_completed_response() -> None:
    events = [
        b'event: response.created\ndata: {"type":"response.created"}\n\n',
        b'event: response.output_text.delta\ndata: {"delta":"event: response.completed\\n[DONE]"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    ]
    for size in (1, 7, 1000):
        cutter = EventCutter(ChatForm.RESPONSES)
        begin, end = b"".join(events[:2]), events[2]
        for at in range(0, len(begin), size):
            cutter.feed(begin[at : at + size])
        assert not cutter.is_done
        passed = b"".join(cutter.feed(end[at : at + size]) for at in range(0, len(end), size))
        assert passed == end
        assert cutter.is_done


def test_a_named_events_error_is_none() -> None:
    event = b'event: response.completed\ndata: {"response":{"error":{"code":"x"}}}\n\n'
    assert error_in_first_event(event) is None
    assert cut_at_error(event) == (event, None)


def test_events_with_names() -> None:
    delta = b'event: content_block_delta\ndata: {"delta": {"text": "event: message_stop \\"error\\""}}\n\n'
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
    for at in range(1, len(stop)):
        cutter = EventCutter(ChatForm.MESSAGES)
        assert cutter.feed(delta + stop[:at]) == (delta + stop if at == len(stop) else delta)
        assert not cutter.is_done
        assert cutter.feed(stop[at:]) == stop
        assert cutter.is_done
    assert not EventCutter(ChatForm.MESSAGES).feed(b"data: [DONE]\n")
    fault = {"type": "internal_error", "message": "x"}
    assert cut_at_error(delta + error + stop) == (delta, fault)
    assert cut_at_error(delta + stop) == (delta + stop, None)
    assert error_in_first_event(error + stop) == fault
    assert error_in_first_event(delta) is None
