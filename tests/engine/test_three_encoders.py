"""Three encoders, one killed in the middle of its jobs: every request succeeds, some a lease later."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.support.fast.client import Answer, Client, Question, ask_all
from tests.support.fast.redis_inspection import jobs_in_hand, registered_records
from tests.support.real import inspection
from tests.support.real.processes import Part, pids_of, send
from tests.support.real.questions import Catalogue
from tests.support.real.system import EXACT, System, running_monolith, running_system
from tests.support.waiting import wait_until
from triptych_cli.supervisor.process import shared_memory_of
from triptych_common.domain.hashing import media_digest, mm_hash
from triptych_encoder.settings import EncoderSettings

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

SEED = 61
NUM_QUESTIONS = 12  # as many as three encoders have slots
ENCODE_DELAY_MS = 300
CLIENT_LIMIT_S = 100.0
TAKEN_LIMIT_S = 30
RESTART_LIMIT_S = 300
IDLE_LIMIT_S = 60
LEASE_S = EncoderSettings.model_fields["takeover_idle_ms"].default / 1000


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Catalogue:
    with running_monolith(tmp_path_factory.mktemp("monolith")) as monolith:
        return Catalogue.answered_by(monolith, SEED, {1: NUM_QUESTIONS})


@pytest.fixture
def three(questions: Catalogue) -> Iterator[System]:
    options = " ".join(EXACT)
    with running_system(
        "--encoders=3", f"--encoder-args={options}", f"--prefill-decode-args={options}",
        TRIPTYCH_DEBUG_ENCODE_DELAY_MS=str(ENCODE_DELAY_MS),
    ) as running:  # fmt: skip
        yield running


async def test_one_is_killed_in_the_middle_of_its_jobs(three: System, questions: Catalogue) -> None:
    rng = random.Random(SEED)
    quiet, shaken = ([questions.draw(rng, [True], stream=True) for _ in range(NUM_QUESTIONS)] for _ in "12")
    (url,) = inspection.gateway_urls(three, 1)
    async with Client(url, CLIENT_LIMIT_S) as client:
        before = await ask_all(client, quiet)
        asked = asyncio.ensure_future(ask_all(client, shaken))
        victim, in_hand, memory = await asyncio.to_thread(kill_one_at_work, three)
        after = await asked
    assert all(answer.is_right for answer in [*before, *after]), [str(each) for each in [*before, *after]]

    hashes = [hash_of(three, question) for question in shaken]
    wait_until(
        lambda: set(hashes) <= num_encodes(three).keys(), TAKEN_LIMIT_S, "every encode's span was written"
    )
    encodes = num_encodes(three)
    taken_over = set(hashes) & in_hand
    assert taken_over, in_hand
    assert all(encodes[each] <= 1 + (each in taken_over) for each in hashes), (encodes, taken_over)
    assert all(encodes[hash_of(three, question)] == 1 for question in quiet)
    assert memory
    wait_until(lambda: is_back(three, victim), RESTART_LIMIT_S, "the victim is back")
    wait_until(lambda: not inspection.leftovers(three, [url]), IDLE_LIMIT_S, "nothing is left over")
    assert not [path for path in memory if path.exists()]
    print_costs(victim, before, after, [each in taken_over for each in hashes])


def kill_one_at_work(system: System) -> tuple[str, set[str], set[Path]]:
    """Stop an encoder with several jobs, note them, kill it.

    Returns:
        Its name, the mm_hashes of its jobs, and the files of its shared memory.
    """
    found: dict[str, set[str]] = {}

    def is_at_work() -> bool:
        found.clear()
        found.update(jobs_in_hand(inspection.redis_url(system), inspection.DEPLOYMENT))
        return any(len(each) > 1 for each in found.values())

    wait_until(is_at_work, TAKEN_LIMIT_S, "an encoder has several jobs in hand")
    victim = max(found, key=lambda name: len(found[name]))
    pids = pids_of(system, victim, Part.WHOLE)
    send(pids, signal.SIGSTOP)  # from here on it finishes nothing
    in_hand = jobs_in_hand(inspection.redis_url(system), inspection.DEPLOYMENT)[victim]
    memory = shared_memory_of([psutil.Process(pid) for pid in pids])
    send(pids, signal.SIGKILL)
    return victim, in_hand, memory


def is_back(system: System, victim: str) -> bool:
    service = system.services()[victim]
    return service["num_restarts"] == 1 and service["state"] == "ready"


def hash_of(system: System, question: Question) -> str:
    records = registered_records(inspection.redis_url(system), inspection.DEPLOYMENT, ["prefill_decode-0"])
    (image,) = question.images
    return mm_hash(
        modality="image",
        media_digest=media_digest(image),
        namespace_digest=records["prefill_decode-0"]["namespace_digest"],
        processor_options={},
        media_io_options={},
    )


def num_encodes(system: System) -> Counter[str]:
    """By mm_hash."""
    return Counter(each for each, _ in inspection.encodes(system))


def print_costs(
    victim: str, before: Sequence[Answer], after: Sequence[Answer], taken_over: Sequence[bool]
) -> None:
    """What it cost, against the same number of questions before."""
    usual_s = median(answer.elapsed_s for answer in before)
    added = [(answer.elapsed_s - usual_s, taken) for answer, taken in zip(after, taken_over, strict=True)]
    for what, wanted in (("taken over", True), ("others", False)):
        delays = sorted(round(seconds, 2) for seconds, taken in added if taken is wanted)
        print(f"{victim} was killed; {what}: seconds added to {usual_s:.2f}: {delays}; lease {LEASE_S:g} s")
