"""How many jobs a gateway may have with encoders."""

from hypothesis import given
from hypothesis import strategies as st

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_gateway.encode.job_window import SLOTS_OF_NONE, Capacity, JobWindow

DIGEST = "d" * 64


def mm_hash(number: int) -> MmHash:
    return MmHash(f"{number:064x}")


def filled(window: JobWindow, flow: str, first: int = 0) -> int:
    """As many jobs of `flow` as it takes."""
    number = 0
    while window.has_room(DIGEST, flow):
        window.begin_job(mm_hash(first + number), DIGEST, flow)
        number += 1
    return number


def test_the_last_places_are_for_flows_that_have_none() -> None:
    window = JobWindow(lambda digest: Capacity(num_slots=10, num_spare=2, num_gateways=1))
    assert filled(window, "flood") == 8
    assert window.has_room(DIGEST, "one")
    window.begin_job(mm_hash(100), DIGEST, "one")
    assert not window.has_room(DIGEST, "one")
    assert window.end_job(mm_hash(0))
    assert window.num_jobs(DIGEST) == 8
    assert not window.has_room(DIGEST, "flood")


def test_a_job_that_was_not_published_takes_no_place() -> None:
    window = JobWindow(lambda digest: Capacity(1, 0, 1))
    window.begin_job(mm_hash(1), DIGEST, "a")
    window.end_unpublished(mm_hash(1))
    assert window.has_room(DIGEST, "a")
    window.begin_job(mm_hash(1), DIGEST, "a")
    window.confirm_job(mm_hash(1), DEFAULT_STORE)
    window.end_unpublished(mm_hash(1))
    assert not window.has_room(DIGEST, "a")
    assert window.end_job(mm_hash(1))
    assert not window.end_job(mm_hash(1))
    assert len(window) == 0


def test_without_an_encoder_a_few_jobs_wait_for_one() -> None:
    assert filled(JobWindow(lambda digest: Capacity(0, 0, 1)), "a") == SLOTS_OF_NONE


def test_a_gateway_goes_beyond_its_part_by_what_is_free() -> None:
    window = JobWindow(lambda digest: Capacity(num_slots=10, num_spare=2, num_gateways=4))
    assert filled(window, "a") == 2
    window.note_stream(DIGEST, 2)
    assert filled(window, "a", 100) == 2, "of the 6 that are free a fourth"
    window.note_stream(DIGEST, 8)
    assert not window.has_room(DIGEST, "a")
    window.forget_streams()
    assert not window.has_room(DIGEST, "a")


def test_a_flow_that_has_none_gets_a_spare_place_at_the_gateway_of_a_flood() -> None:
    window = JobWindow(lambda digest: Capacity(num_slots=16, num_spare=4, num_gateways=2))
    num = 0
    for _ in range(8):
        num += filled(window, "flood", num)
        window.note_stream(DIGEST, num)
    assert num == 12
    assert not window.has_room(DIGEST, "flood")
    assert filled(window, "one", 100) == 1, "it has one then"
    assert filled(window, "other", 200) == 1
    assert not window.has_room(DIGEST, "third"), "of the 4 that were free a half, until they are read again"
    window.note_stream(DIGEST, 14)
    assert window.has_room(DIGEST, "third")


@given(
    num_slots=st.integers(1, 20),
    num_gateways=st.integers(1, 5),
    steps=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["read", "publish", "new", "end", "replace"])),
        max_size=150,
    ),
)
def test_all_gateways_together_stay_within_the_bound(
    num_slots: int, num_gateways: int, steps: list[tuple[int, str]]
) -> None:
    """3 S + G, whatever each of them reads when; and a gateway with nothing under way is never held back."""
    capacity = Capacity(num_slots, num_slots // 4, num_gateways)
    windows = [JobWindow(lambda digest: capacity) for _ in range(num_gateways)]
    jobs: list[list[int]] = [[] for _ in windows]
    for number, (which, step) in enumerate(steps):
        at = which % num_gateways
        window, own = windows[at], jobs[at]
        assert own or window.has_room(DIGEST, f"flow-{at}")
        if step == "read":
            window.note_stream(DIGEST, sum(map(len, jobs)))
        elif step == "end" and own:
            assert window.end_job(mm_hash(own.pop(0)))
        elif step == "replace" and own:
            assert window.end_job(mm_hash(own.pop(0)), is_followed=True)
            if window.has_room(DIGEST, f"flow-{at}"):
                window.begin_job(mm_hash(1000 * number), DIGEST, f"flow-{at}")
                own.append(1000 * number)
        elif step == "publish":
            while window.has_room(DIGEST, f"flow-{at}"):
                name = 1000 * number + len(own)
                window.begin_job(mm_hash(name), DIGEST, f"flow-{at}")
                own.append(name)
        elif step == "new":
            while window.has_room(DIGEST, f"flow-{number}-{len(own)}"):
                name = 1000 * number + len(own)
                window.begin_job(mm_hash(name), DIGEST, f"flow-{number}-{len(own)}")
                own.append(name)
        assert sum(map(len, jobs)) <= 3 * num_slots + num_gateways
