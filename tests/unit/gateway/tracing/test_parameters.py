"""Numbers of a request's body, and nothing that its caller wrote."""

from triptych_gateway.tracing.request_span import parameters_of


def test_parameters_as_the_conventions_name_them() -> None:
    body = {
        "model": "m", "messages": [{"role": "user", "content": "secret"}], "max_tokens": 7, "temperature": 1,
        "top_p": 0.5, "top_k": 4, "seed": -3, "frequency_penalty": 0.25, "presence_penalty": -1.5, "n": 3,
        "stop": ["secret", "words"], "user": "secret", "metadata": {"a": "secret"},
    }  # fmt: skip
    found = parameters_of(body)
    assert found == {
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.seed": -3,
        "gen_ai.request.frequency_penalty": 0.25,
        "gen_ai.request.presence_penalty": -1.5,
        "gen_ai.request.choice.count": 3,
        "triptych.num_stop_sequences": 2,
    }
    assert isinstance(found["gen_ai.request.temperature"], float), "one type for all requests"


def test_what_is_not_of_the_right_kind_is_left_out() -> None:
    body = {
        "max_tokens": True, "temperature": "hot", "top_p": None, "top_k": 1.5, "seed": 1 << 63, "n": "2",
        "stop": 5,
    }  # fmt: skip
    assert parameters_of(body) == {}
    assert parameters_of({"n": 1}) == {}


def test_the_newer_name_counts() -> None:
    found = parameters_of({"max_completion_tokens": 5, "max_tokens": 9, "stop": "x"})
    assert found == {"gen_ai.request.max_tokens": 5, "triptych.num_stop_sequences": 1}
