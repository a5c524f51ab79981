"""Places in a body: named, read, replaced without a change of what else there is."""

import copy
from typing import Any

from triptych_gateway.request.content_parts import format_place, lists_before, replace_at, value_at

NESTED = ("messages", 1, "content", 0, "content", 2)


def body() -> dict[str, Any]:
    return {
        "messages": [
            {"content": ["a", "b"]},
            {"content": [{"content": ["c", "d", "e"]}, "f"], "role": "user"},
            {"content": "g"},
        ],
        "model": "m",
    }


def test_a_place_is_written_as_a_path() -> None:
    assert format_place(NESTED) == "messages[1].content[0].content[2]"
    assert format_place(()) == ""


def test_values_are_replaced_in_a_copy() -> None:
    sent, before = body(), copy.deepcopy(body())
    places = [NESTED, ("messages", 0, "content", 1), ("messages", 1, "content", 1), (*NESTED[:-1], 0)]
    replaced = replace_at(sent, ((place, index) for index, place in enumerate(places)))
    assert sent == before
    assert [value_at(replaced, place) for place in places] == [0, 1, 2, 3]
    assert replaced["messages"][1]["content"] == [{"content": [3, "d", 0]}, 2]
    assert replaced["messages"][2] is sent["messages"][2]
    assert replace_at(sent, ()) == before


def test_what_comes_before_a_place_in_each_list() -> None:
    sent = body()
    assert list(lists_before(sent, NESTED)) == [sent["messages"][:1], [], ["c", "d"]]
