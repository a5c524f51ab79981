"""Random ids: none comes twice, not in threads and not after a fork."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from triptych_common.telemetry.tracing import ID_BYTES, random_id

NUM_IDS = 2000


def test_ids_are_long_and_none_comes_twice_in_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: random_id(), range(NUM_IDS)))
    assert {len(each) for each in ids} == {ID_BYTES}
    assert len(set(ids)) == NUM_IDS


def _send_some(to: Connection) -> None:
    to.send_bytes(b"".join(random_id() for _ in range(NUM_IDS)))


def test_a_fork_has_its_own() -> None:
    """Engines of one worker begin alike."""
    random_id()  # some are drawn, and not used yet
    fork = multiprocessing.get_context("fork")
    drawn = []
    for _ in range(2):
        own, other = fork.Pipe(duplex=False)
        child = fork.Process(target=_send_some, args=(other,))
        child.start()
        drawn.append(own.recv_bytes())
        child.join()
    drawn.append(b"".join(random_id() for _ in range(NUM_IDS)))
    ids = [data[at : at + ID_BYTES] for data in drawn for at in range(0, len(data), ID_BYTES)]
    assert len(set(ids)) == len(ids) == 3 * NUM_IDS
