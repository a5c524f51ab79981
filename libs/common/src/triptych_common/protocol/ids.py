"""Identifiers that travel on the wire. A NewType each, so that one cannot stand for another."""

from typing import Annotated, NewType

from pydantic import StringConstraints

RequestId = NewType("RequestId", str)
"""One client request, minted by the gateway. Also the `X-Request-Id` of the answer."""

JobId = NewType("JobId", str)
"""One encode job. Idempotent: a job taken over from a dead encoder keeps its id."""

MmHash = NewType("MmHash", str)
"""Content identity of one media item: 64 lower-case hex digits of BLAKE3 (see `domain.hashing`)."""

ReservationId = NewType("ReservationId", int)
"""Blocks of the region held before the tensor exists. Unique per store generation."""

PinId = NewType("PinId", int)
"""A lease that forbids eviction of one entry. Unique per store generation."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/@-]+$")]
MmHashText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
NamespaceDigestText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
