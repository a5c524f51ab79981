"""Scripts name their arguments once: in the header of their file."""

import pytest

from triptych_common.coordination.single_flight import PRELUDE_WITH_REQUESTERS
from triptych_common.redis_client.scripts import load_script

FINISH = load_script("triptych_common.coordination", "finish_flight", prelude=PRELUDE_WITH_REQUESTERS)


def test_arguments_go_out_in_the_order_of_the_header() -> None:
    assert FINISH.argument_names == ("job", "metadata", "finished_ms")
    found = FINISH.arguments(["r:a/0", "r:b/0"], finished_ms=5, job="j", metadata="m")
    assert found == ["j", "m", 5, "r:a/0", "r:b/0"]


@pytest.mark.parametrize(
    "named", [{}, {"job": "j"}, {"job": "j", "metadata": "m", "finished_ms": 5, "finshed_ms": 5}]
)
def test_a_missing_or_unknown_name_is_refused(named: dict[str, str | int]) -> None:
    with pytest.raises(TypeError, match="finish_flight takes"):
        FINISH.arguments(**named)
