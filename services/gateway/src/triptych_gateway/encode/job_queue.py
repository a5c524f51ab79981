"""Limits of each namespace's orders: a new one is refused while too many wait, or one waits too long.

Pure. What waits on the stream comes with the claim of a flight (`SingleFlight.claim_flight`), where it is
asked for, and is read while orders wait at this gateway. A flow has to answer for its own
orders that wait here: none is refused because another flow asks for too much. How many jobs may be on the
stream is no reason to refuse one: `JobWindow` lets orders wait. Only where no encoder takes any job, all
flows are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cachetools import LRUCache

from triptych_common.coordination import Backlog
from triptych_common.domain.errors import RequestError

READ_INTERVAL_S = 0.1
READ_HOLDS_S = 1.0
MAX_NAMESPACES = 64  # that are remembered; each is served by engines of its own


@dataclass
class _Read:
    """What was read of a namespace's jobs."""

    oldest_s: float = 0.0
    at: float = float("-inf")  # monotonic seconds


class JobQueue:
    """Refuses what would wait too long, by what waits here and the age of the stream's oldest job.

    Each namespace has bounds of its own: its encoders take no others' jobs.
    """

    def __init__(self, max_jobs: int, max_age_s: float) -> None:
        self._max_jobs = max_jobs
        self._max_age_s = max_age_s
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)

    def needs_reading(self, namespace_digest: str, now: float) -> bool:
        """Whether what is known of the namespace's jobs is too old for the next one."""
        return now - self._reads.get(namespace_digest, _Read()).at >= READ_INTERVAL_S

    def note_backlog(self, namespace_digest: str, backlog: Backlog, now: float) -> None:
        """It was read."""
        self._reads[namespace_digest] = _Read(backlog.oldest_s, now)

    def admit_order(
        self, namespace_digest: str, flow: str, num_held: Mapping[str, int], oldest_s: float, now: float
    ) -> None:
        """Let an order of `flow` wait for its turn, or to be published at once.

        Args:
            num_held: orders that wait at this gateway, by flow.
            oldest_s: how long the oldest of them has waited that is of this flow and class.

        Raises:
            RequestError: 429, too many orders of this flow wait, or one of it for too long.
        """
        read = self._reads.get(namespace_digest, _Read())
        is_known = now - read.at < READ_HOLDS_S
        num_flows = len({*num_held, flow})
        if sum(num_held.values()) >= self._max_jobs and num_held.get(flow, 0) >= self._max_jobs // num_flows:
            raise _full()
        if oldest_s >= self._max_age_s or (is_known and num_held and read.oldest_s >= self._max_age_s):
            raise _slow()

    def admit_job(self, namespace_digest: str) -> None:
        """Let a job of the namespace be published, of whatever flow.

        Raises:
            RequestError: 429, the stream has a job that no encoder took for too long.
        """
        if self._reads.get(namespace_digest, _Read()).oldest_s >= self._max_age_s:
            raise _slow()


def _full() -> RequestError:
    message = "too many media wait for an encoder; try again shortly"
    return RequestError(429, "encode_queue_full", message)


def _slow() -> RequestError:
    message = "media wait too long for an encoder; try again shortly"
    return RequestError(429, "encode_queue_slow", message)
