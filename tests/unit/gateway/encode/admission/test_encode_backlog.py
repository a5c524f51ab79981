"""How long new items would wait for encoders, by what was ordered and how fast it was done."""

import pytest

from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeClass, ImageProperties, Modality
from triptych_gateway.encode.encode_backlog import (
    FIRST_ENCODE_S,
    FIRST_PACE,
    MIN_BUSY,
    MIN_KNOWN,
    EncodeBacklog,
    EncodeWork,
)

DIGEST, OTHER = "0" * 64, "1" * 64
FLOOD, ONE = FairKey(flow="flood"), FairKey(flow="one")
BATCH = FairKey(EncodeClass.BATCH, "batch")
MEGAPIXEL = EncodeWork.of(Modality.IMAGE, ImageProperties(format="PNG", width=1000, height=1000))


def measured(encode_s: float = 0.5) -> EncodeBacklog:
    backlog = EncodeBacklog()
    for _ in range(MIN_KNOWN):
        backlog.observe(DIGEST, MEGAPIXEL, encode_s)
    return backlog


def order(backlog: EncodeBacklog, fair_key: FairKey, num: int, digest: str = DIGEST) -> list[MmHash]:
    hashes = [MmHash(f"{fair_key.flow}-{len(backlog)}-{number}") for number in range(num)]
    for each in hashes:
        backlog.begin_item(each, digest, fair_key, MEGAPIXEL)
    return hashes


def ahead_s(
    backlog: EncodeBacklog,
    fair_key: FairKey,
    *,
    num_encoders: int = 1,
    now: float = 1.0,
    pace: float = FIRST_PACE,
) -> float:
    """In seconds of encoders, at `pace`."""
    wait = backlog.predict(DIGEST, fair_key, [MEGAPIXEL], num_encoders, now)
    assert wait is not None
    return wait.ahead_s / pace


def test_a_flow_waits_for_all_of_its_own_and_one_turn_of_another_s_flood() -> None:
    backlog = measured()
    order(backlog, FLOOD, 100)
    assert ahead_s(backlog, FLOOD) == pytest.approx(50.0)
    assert ahead_s(backlog, ONE) == pytest.approx(0.5)
    order(backlog, ONE, 4)
    assert ahead_s(backlog, ONE) == pytest.approx(2.0 + 2.5)


def test_a_lower_class_waits_for_higher_ones_and_holds_up_none() -> None:
    backlog = measured()
    order(backlog, BATCH, 100)
    assert ahead_s(backlog, FLOOD) == 0.0
    order(backlog, FLOOD, 4)
    other = FairKey(EncodeClass.BATCH, "other")
    assert ahead_s(backlog, other) == pytest.approx(0.5 + 2.0)


def test_encoders_share_the_work() -> None:
    backlog = measured()
    order(backlog, FLOOD, 100)
    assert ahead_s(backlog, FLOOD, num_encoders=4) == pytest.approx(12.5)


def test_another_namespace_has_encoders_of_its_own() -> None:
    backlog = measured()
    order(backlog, FLOOD, 100, OTHER)
    assert ahead_s(backlog, FLOOD) == 0.0


def test_a_report_behind_the_end_of_its_request_is_a_measure() -> None:
    backlog = EncodeBacklog()
    for number, each in enumerate(order(backlog, ONE, MIN_KNOWN)):
        backlog.end_item(each)
        assert backlog.namespace_of(each) == DIGEST
        backlog.complete_item(each, 0.5, 1, 1.0 + number)
        assert backlog.namespace_of(each) is None
    order(backlog, ONE, 4)
    assert ahead_s(backlog, ONE) == pytest.approx(2.0)


def test_small_images_say_nothing_of_much_larger_ones() -> None:
    """A processor shrinks these: by their pixels, one of 64 megapixels would hold up others for minutes."""
    backlog = EncodeBacklog()
    small, double, huge = (
        EncodeWork.of(Modality.IMAGE, ImageProperties(format="PNG", width=side, height=side))
        for side in (100, 200, 8000)
    )
    for _ in range(MIN_KNOWN):
        backlog.observe(DIGEST, small, 0.02)
    assert backlog.predict(DIGEST, ONE, [huge], 1, 1.0) is None
    backlog.begin_item(MmHash("huge"), DIGEST, ONE, huge)
    wait = backlog.predict(DIGEST, ONE, [double], 1, 1.0)
    assert wait is not None
    assert (wait.ahead_s, wait.own_s) == (0.0, pytest.approx(0.08 * FIRST_PACE))
    for _ in range(MIN_KNOWN):
        backlog.observe(DIGEST, huge, 2.0)
    assert ahead_s(backlog, ONE) == pytest.approx(2.0)


def test_nothing_is_predicted_of_a_speed_that_is_not_known() -> None:
    backlog = EncodeBacklog()
    order(backlog, FLOOD, 100)
    assert backlog.predict(DIGEST, FLOOD, [MEGAPIXEL], 1, 0.0) is None
    sound = EncodeWork.of(Modality.AUDIO, None)
    assert measured().predict(DIGEST, FLOOD, [sound], 1, 0.0) is None


def test_what_ends_waits_no_more_and_an_item_counts_once() -> None:
    backlog = measured()
    hashes = order(backlog, FLOOD, 10)
    for each in (*hashes, *hashes):
        backlog.begin_item(each, DIGEST, ONE, MEGAPIXEL)
    assert ahead_s(backlog, FLOOD) == pytest.approx(5.0)
    for each in (*hashes[:4], *hashes[:4]):
        backlog.end_item(each)
    assert ahead_s(backlog, FLOOD) == pytest.approx(3.0)
    for each in hashes:
        backlog.end_item(each)
    assert ahead_s(backlog, FLOOD) == 0.0
    assert backlog.num_items(DIGEST, FLOOD) == len(backlog) == 0


def test_the_pace_is_what_passes_while_encoders_are_busy() -> None:
    """0.5 s of work take 1 s: something else has the cores."""
    backlog = measured()
    hashes = order(backlog, FLOOD, 20)
    for number in range(20 - 2 * MIN_BUSY):
        backlog.complete_item(hashes[number], 0.5, 1, float(number))
    assert ahead_s(backlog, FLOOD, now=12.0, pace=1.0) == pytest.approx(2 * MIN_BUSY * 1.0)


def test_pauses_of_callers_are_no_pace() -> None:
    backlog = measured()
    for number in range(10):
        (only,) = order(backlog, ONE, 1)
        backlog.complete_item(only, 0.5, 1, 60.0 * number)
    order(backlog, ONE, 10)
    assert ahead_s(backlog, ONE, now=550.0) == pytest.approx(5.0)


def test_larger_images_take_longer() -> None:
    backlog = measured(0.4)
    small, large = (
        EncodeWork.of(Modality.IMAGE, ImageProperties(format="PNG", width=side, height=side))
        for side in (100, 2000)
    )
    for encode_s in (5.0, *[0.01] * (MIN_KNOWN - 1)):  # the first one of a shape takes longer
        backlog.observe(DIGEST, small, encode_s)
    found = [backlog.predict(DIGEST, ONE, [each], 1, 0.0) for each in (small, MEGAPIXEL, large)]
    assert [each and each.own_s / FIRST_PACE for each in found] == pytest.approx([0.01, 0.4, 1.6])


def test_three_long_encodes_are_a_measure() -> None:
    """Refusals need not wait for two more seconds of encoding; of short ones the first is no measure."""
    short, long = EncodeBacklog(), EncodeBacklog()
    for encode_s in (0.9, 0.6, 0.6):
        assert long.predict(DIGEST, ONE, [MEGAPIXEL], 1, 0.0) is None
        long.observe(DIGEST, MEGAPIXEL, encode_s)
        short.observe(DIGEST, MEGAPIXEL, encode_s / 10)
    wait = long.predict(DIGEST, ONE, [MEGAPIXEL], 1, 0.0)
    assert wait is not None
    assert wait.own_s == pytest.approx(0.6 * FIRST_PACE)
    assert short.predict(DIGEST, ONE, [MEGAPIXEL], 1, 0.0) is None


def test_single_encodes_of_many_sizes_are_no_measure() -> None:
    """They are the first ones of their shapes: by these, small images would take seconds."""
    backlog = EncodeBacklog()
    for side in (64, 112, 224, 448, 640, 1000, 1400):
        work = EncodeWork.of(Modality.IMAGE, ImageProperties(format="PNG", width=side, height=side))
        backlog.observe(DIGEST, work, 0.5)
    assert backlog.predict(DIGEST, ONE, [MEGAPIXEL], 1, 0.0) is None


def waiting_s(backlog: EncodeBacklog, digest: str = DIGEST) -> float:
    return backlog.waiting_s(digest, lambda mm_hash: True, 1.0)


def test_waiting_work_is_that_of_all_lanes_for_one_encoder() -> None:
    backlog = measured()
    order(backlog, FLOOD, 3)
    order(backlog, BATCH, 2)
    order(backlog, ONE, 4, OTHER)
    assert waiting_s(backlog) == pytest.approx(5 * 0.5 * FIRST_PACE)
    assert waiting_s(backlog, OTHER) == pytest.approx(4 * FIRST_ENCODE_S * FIRST_PACE), "not measured"


def test_items_that_count_elsewhere_are_left_out() -> None:
    backlog = measured()
    own, _ = order(backlog, FLOOD, 2)
    assert backlog.waiting_s(DIGEST, lambda mm_hash: mm_hash == own, 1.0) == pytest.approx(0.5 * FIRST_PACE)
