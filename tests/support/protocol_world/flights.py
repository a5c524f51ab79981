"""MODEL of `bus.Inflight` where Redis keeps no flights: every order is its gateway's own.

What holds without them must hold with them; that the flights themselves do what they should is tested
against a model of their own (`support.inflight_model`).
"""

from collections.abc import Iterable
from typing import Any

from triptych_common.bus import Claim, Standing, Start
from triptych_common.protocol.ids import JobId
from triptych_common.protocol.messages import EncodeFailed, EncodeJob, EncoderCacheMetadata, Requester


class NoFlights:
    """Publishes by `bus`; knows nobody who joined."""

    def __init__(self, bus: Any, encode_jobs: str) -> None:
        self._bus = bus
        self._encode_jobs = encode_jobs

    async def claim(
        self, mm_hash: str, requesters: Iterable[Requester], *, mode: str, job_id: str, attempt: int, **_: Any
    ) -> Claim:
        standing = Standing.JOINED if mode == "look" else Standing.OWNER
        return Claim(standing, JobId(job_id), attempt)

    async def publish(self, job: EncodeJob, **options: Any) -> str:
        return str(await self._bus.publish(self._encode_jobs, job, **options))

    async def leave(self, mm_hash: str, keys: Iterable[Any]) -> bool:
        return False

    async def backlog(self) -> tuple[int, float]:
        return await self._bus.stream_length(self._encode_jobs), 0.0

    async def start(
        self, job: EncodeJob, entry_id: str, encoder: str, **_: Any
    ) -> tuple[Start, tuple[Requester, ...]]:
        return Start.STARTED, job.requesters

    async def renew(self, *_: Any, **__: Any) -> bool:
        return True

    async def announce(self, metadata: EncoderCacheMetadata) -> None:
        return None

    async def finish(self, mm_hash: str, job_id: str, told: Iterable[Any]) -> tuple[bool, None]:
        return True, None

    async def fail(self, failure: EncodeFailed, *, by_owner: bool = True) -> None:
        return None
