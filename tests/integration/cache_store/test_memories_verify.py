"""The store's own checks leave alone what is not in its region."""

from collections.abc import Callable

import torch

from tests.support.stores import StoreProcess
from triptych_common.protocol.store import Reserve, Reserved, Seal, Verified, Verify
from triptych_common.region.tensor_view import tensor_spec


def test_bytes_in_redis_are_not_the_regions(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--verify=always")
    session = daemon.connect("encoder-0/worker-0")
    for number, memory in enumerate(("redis", "shm")):
        reserved = session.request(
            Reserve(seq=0, mm_hash=f"{number:064x}", spec=tensor_spec(torch.ones(4, 4)), memory=memory)
        )
        assert isinstance(reserved, Reserved)
        session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    verified = session.request(Verify(seq=0, evict=True))
    assert isinstance(verified, Verified)
    assert (verified.num_intact + verified.num_recorded, verified.num_damaged) == (1, 0)
