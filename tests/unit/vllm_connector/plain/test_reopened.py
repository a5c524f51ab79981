"""Something is opened when it is needed and when it has ended, and a store that is away is left alone."""

import itertools

import pytest

from triptych_common.domain.errors import StoreUnavailableError
from triptych_vllm_connector.plain.reopened import FIRST_RETRY_S, LAST_RETRY_S, Reopened


class Session:
    def __init__(self) -> None:
        self.has_ended = False
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


class Opening:
    """Opens sessions unless `is_away`; `now` is the test's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_away = False
        self.attempts: list[float] = []
        self.reopened = Reopened(self._open, lambda: self.now)

    def _open(self) -> Session:
        self.attempts.append(self.now)
        if self.is_away:
            raise StoreUnavailableError("away")
        return Session()


def test_it_is_opened_again_when_it_has_ended() -> None:
    opening = Opening()
    first = opening.reopened.get()
    first.has_ended = True
    second = opening.reopened.try_get()
    assert second is not None
    assert second is not first
    assert (first.num_closed, second.num_closed) == (1, 0)


def test_a_store_that_is_away_is_tried_less_and_less_often() -> None:
    opening = Opening()
    opening.is_away = True
    while opening.now < 60:
        assert opening.reopened.try_get() is None
        opening.now += FIRST_RETRY_S / 4
    gaps = [later - earlier for earlier, later in zip(opening.attempts, opening.attempts[1:], strict=False)]
    assert all(later > 0.9 * earlier for earlier, later in itertools.pairwise(gaps))
    assert FIRST_RETRY_S <= gaps[0] < 2 * FIRST_RETRY_S
    assert 0.9 * LAST_RETRY_S <= gaps[-1] < LAST_RETRY_S + FIRST_RETRY_S
    opening.is_away = False
    opening.now += LAST_RETRY_S
    assert opening.reopened.try_get() is not None


def test_where_it_is_needed_now_it_is_tried_now() -> None:
    opening = Opening()
    opening.is_away = True
    opening.reopened.try_get()
    with pytest.raises(StoreUnavailableError):
        opening.reopened.get()
    assert len(opening.attempts) == 2
