"""Limits of each namespace's orders: a new one is refused while too many wait, or one waits too long.

Pure. The stream's backlog comes with the claim of a flight (`SingleFlight.claim_flight`), if requested, and
is read while orders wait at this gateway. A flow has to answer for its own orders that wait here: none is
refused because another flow asks for too much. The bound on the stream's jobs refuses none: `JobWindow` lets
orders wait. Only where no encoder takes any job, all flows are refused.
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
    """Jobs of a namespace, as last read from Redis."""

    oldest_s: float = 0.0
    at: float = float("-inf")  # monotonic seconds


class JobQueue:
    """Queue that refuses orders that would wait too long, by its length and the stream's oldest job.

    Each namespace has bounds of its own: its encoders take no others' jobs.
    """

    def __init__(self, max_jobs: int, max_age_s: float) -> None:
        self._max_jobs = max_jobs
        self.max_age_s = max_age_s
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)

    def needs_reading(self, namespace_digest: str, now: float) -> bool:
        """Return whether the last reading of the namespace's jobs is too old for the next job."""
        return now - self._reads.get(namespace_digest, _Read()).at >= READ_INTERVAL_S

    def note_backlog(self, namespace_digest: str, backlog: Backlog, now: float) -> None:
        """Record a backlog that was read."""
        self._reads[namespace_digest] = _Read(backlog.oldest_s, now)

    def is_full(self, flow: str, num_held: Mapping[str, int], num_new: int = 1) -> bool:
        """Return whether too many orders would wait here, of which `flow` would have more than its part.

        Args:
            num_held: orders that wait, by flow.
            num_new: orders of `flow` that are to come.
        """
        num_total, num_flows = sum(num_held.values()) + num_new, len({*num_held, flow})
        return num_total > self._max_jobs and num_held.get(flow, 0) + num_new > self._max_jobs // num_flows

    def is_slow(
        self, namespace_digest: str, num_held: Mapping[str, int], oldest_s: float, now: float
    ) -> bool:
        """Return whether an order would wait too long, by the orders that wait.

        `oldest_s`: how long the oldest order has waited that is of the same flow and class.
        """
        read = self._reads.get(namespace_digest, _Read())
        is_known = now - read.at < READ_HOLDS_S
        return oldest_s >= self.max_age_s or bool(is_known and num_held and read.oldest_s >= self.max_age_s)

    def admit_job(self, namespace_digest: str) -> None:
        """Let a job of the namespace be published, of whatever flow.

        Raises:
            RequestError: 429, the stream has a job that no encoder took for too long.
        """
        if self._reads.get(namespace_digest, _Read()).oldest_s >= self.max_age_s:
            raise queue_slow()


def queue_full(param: str | None = None) -> RequestError:
    message = "too many media wait for an encoder; try again after Retry-After seconds"
    return RequestError(429, "encode_queue_full", message, param)


def queue_slow(param: str | None = None) -> RequestError:
    message = "media wait too long for an encoder; try again after Retry-After seconds"
    return RequestError(429, "encode_queue_slow", message, param)
