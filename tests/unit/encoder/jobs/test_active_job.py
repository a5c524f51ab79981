"""The states of a job at the encoder."""

from typing import Any

import pytest

from tests.support.encoder.encoder_bench import delivery_of
from triptych_common.protocol.messages import EncodeJob
from triptych_encoder.jobs.active_job import ALLOWED, ActiveJob, JobState

S = JobState
WAYS = {
    S.STARTED: (),
    S.PREPROCESSED: (S.PREPROCESSED,),
    S.RESERVED: (S.PREPROCESSED, S.RESERVED),
    S.ENCODING: (S.PREPROCESSED, S.RESERVED, S.ENCODING),
    S.SEALED: (S.PREPROCESSED, S.RESERVED, S.ENCODING, S.SEALED),
    S.COMPLETED: (S.PREPROCESSED, S.RESERVED, S.SEALED, S.COMPLETED),
    S.FAILED: (S.FAILED,),
    S.HANDED_BACK: (S.HANDED_BACK,),
    S.DROPPED: (S.PREPROCESSED, S.RESERVED, S.DROPPED),
}


def job_in(state: JobState) -> ActiveJob:
    unused: Any = None
    delivery: Any = delivery_of()
    message = delivery.envelope.message
    assert isinstance(message, EncodeJob)
    job = ActiveJob(unused, unused, unused, delivery, message, message.requesters)
    for each in WAYS[state]:
        job.enter(each)
    assert job.state is state
    return job


@pytest.mark.parametrize("state", S)
def test_every_state_has_its_row(state: JobState) -> None:
    for to in ALLOWED[state]:
        job_in(state).enter(to)
    assert job_in(state).has_blocks == (state not in (S.STARTED, S.PREPROCESSED))
