"""What `up` checks of a Redis that it did not start."""

from triptych_cli.system.preflight import check_redis


def test_a_redis_that_answers_passes(redis_url: str) -> None:
    check_redis(redis_url, "default")
