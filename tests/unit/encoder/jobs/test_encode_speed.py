"""How fast an encoder says that it is."""

from triptych_encoder.jobs.job_telemetry import CHANGE, MIN_ENCODES, EncodeSpeed


def test_it_is_known_after_a_few_encodes_and_the_first_does_not_count() -> None:
    speed = EncodeSpeed()
    speed.observe(100, 60.0)  # the first one compiles
    for _ in range(MIN_ENCODES - 2):
        speed.observe(100, 1.0)
    assert speed.poll_change() is None
    speed.observe(100, 1.0)
    assert speed.poll_change() == speed.row_s
    assert abs((speed.row_s or 0) - 0.01) < 1e-9


def test_it_is_announced_again_when_it_has_changed_by_enough() -> None:
    speed = EncodeSpeed()
    for _ in range(50):
        speed.observe(100, 1.0)
    assert speed.poll_change() is not None
    for _ in range(50):
        speed.observe(100, 1.1)
    assert speed.poll_change() is None
    for _ in range(50):
        speed.observe(100, 2.0)
    changed = speed.poll_change()
    assert changed is not None
    assert changed > 0.01 * CHANGE
    speed.observe(0, 1.0)
    assert speed.poll_change() is None
