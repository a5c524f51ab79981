"""Two models, and two versions of one model, behind one gateway. Each answer is its own model's.

The other model, and the other version, has other weights in the tower and in the language model. A tensor of
the one in the language model of the other would be a third answer: see `questions`.
"""

import asyncio
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import redis
import yaml

from tests.support.fast.case import check
from tests.support.fast.client import Answer, Client
from tests.support.fast.redis_inspection import stream_leftovers
from tests.support.leftovers import store_leftovers
from tests.support.real import inspection
from tests.support.real.gateways import another_gateway
from tests.support.real.joining import (
    DEPLOYMENT,
    JoinedEngine,
    joined_engines,
    records_of,
    system_without_engines,
)
from tests.support.real.questions import RealQuestion
from tests.support.real.roles import Instance
from tests.support.real.system import (
    EXACT,
    MODEL,
    Server,
    System,
    image_part,
    running_monolith,
    running_system,
)
from tests.support.real.weights import other_weights
from tests.support.waiting import until, until_async, wait_until
from triptych_common.protocol.messages import Role

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

NUM_TEXTS, NUM_IMAGES = 16, 32
MIN_OF_EACH = 10  # conversations: each version gets some of each kind
NUM_TOKENS = 24
NUM_ASKED_AT_ONCE = 8
NUM_CALLERS = 3
PAUSE_S = 0.1  # two cores start engines meanwhile
NUM_ANSWERS = 24  # of each version, in each phase in which it serves
CLIENT_LIMIT_S = 120.0
PHASE_LIMIT_S = 240.0
SPANS_LIMIT_S = 10
IDLE_LIMIT_S = 60
START_LIMIT_S = 60
STATES = ("running", "waiting")
OLD = {"encoder-old": Role.ENCODE, "prefill_decode-old": Role.PREFILL_DECODE}
NEW = {"encoder-new": Role.ENCODE, "prefill-new": Role.PREFILL, "decode-new": Role.DECODE}
VERSIONS = {"1": OLD, "2": NEW}
SECOND = {"encoder-b": Role.ENCODE, "prefill_decode-b": Role.PREFILL_DECODE}
OTHER_MODEL = "other-vl"
ALIAS = "reads-digits"


@dataclass(frozen=True)
class VersionedQuestion(RealQuestion):
    """Known is the beginning of each version's answer."""

    by_version: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def words_of(self, namespace: str) -> list[str]:
        """Of a version, by its label."""
        return [str(each) for each in self.by_version[namespace][: self.num_tokens]]


def answers_of(server: Server, asked: Sequence[VersionedQuestion]) -> list[tuple[int, ...]]:
    def answer(question: VersionedQuestion) -> tuple[int, ...]:
        content = [*map(image_part, question.images), {"type": "text", "text": question.text}]
        return tuple(server.ask(content, max_tokens=question.num_tokens, ignore_eos=True).token_ids)

    with ThreadPoolExecutor(NUM_ASKED_AT_ONCE) as pool:
        return list(pool.map(answer, asked))


@pytest.fixture(scope="module")
def asked(strips: ModuleType) -> list[VersionedQuestion]:
    images = [strip.png for strip in strips.held_out_strips(NUM_IMAGES, length=None, seed=71)]
    texts = [VersionedQuestion(f"count to {number}", (), NUM_TOKENS) for number in range(NUM_TEXTS)]
    return texts + [
        VersionedQuestion(f"read the digits {number}", (image,), NUM_TOKENS)
        for number, image in enumerate(images)
    ]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def questions(
    asked: list[VersionedQuestion], other: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[VersionedQuestion]:
    """With the answers of a monolithic vLLM with the weights of each version.

    Those alone whose answers differ, also from what the language model of one version makes of a tensor of
    the other.
    """
    made = tmp_path_factory.mktemp
    models = {
        "1": MODEL,
        "2": other,
        "1, tensors of 2": other_weights(made("mixed"), text=False),
        "2, tensors of 1": other_weights(made("mixed"), tower=False),
    }
    answers = {}
    for version, model in models.items():
        with running_monolith(made("monolith"), model=model, is_forked=True) as monolith:
            answers[version] = answers_of(monolith, asked)
    found = []
    for question, *each in zip(asked, *answers.values(), strict=True):
        if len(set(each)) == (4 if question.images else 2):
            found.append(replace(question, by_version=dict(zip(VERSIONS, each, strict=False))))
    assert sum(not question.images for question in found) >= MIN_OF_EACH, [each.text for each in found]
    assert sum(bool(question.images) for question in found) >= MIN_OF_EACH, [each.text for each in found]
    return found


# ---- from one version to another -----------------------------------------------------------------
@asynccontextmanager
async def asking(url: str, questions: Sequence[VersionedQuestion]) -> AsyncIterator[list[Answer]]:
    """Text and images until the block ends; the answers so far. Each image is new to every cache."""
    answers: list[Answer] = []
    numbers = itertools.count(1)
    rng = random.Random(72)
    is_over = asyncio.Event()

    async def call(client: Client) -> None:
        while not is_over.is_set():
            question, number = rng.choice(questions), next(numbers)
            images = tuple(image + number.to_bytes(8, "big") for image in question.images)
            answers.append(await client.ask(replace(question, images=images, stream=number % 3 > 0)))
            await asyncio.sleep(PAUSE_S)  # a steady load, and not all that the cores can do

    async with Client(url, CLIENT_LIMIT_S) as client, asyncio.TaskGroup() as group:
        for _ in range(NUM_CALLERS):
            group.create_task(call(client))
        try:
            yield answers
        finally:
            is_over.set()


async def until_answered(answers: list[Answer], versions: Sequence[str]) -> None:
    """From now on each of `versions` answers so many, some of them about images, some about text alone."""
    start = len(answers)

    def is_enough(version: str) -> bool:
        own = [each for each in answers[start:] if each.is_right_of([version])]
        return len(own) >= NUM_ANSWERS and len({bool(each.question.images) for each in own}) == 2

    def has_failed() -> bool:
        return not all(each.is_right_of(list(VERSIONS)) for each in answers)

    await until(lambda: has_failed() or all(map(is_enough, versions)), PHASE_LIMIT_S)
    assert_right(answers)


def assert_right(answers: Sequence[Answer]) -> None:
    """None failed, and each is what one version answers, in all of its tokens."""
    check(answers, lambda answer: answer.is_right_of(list(VERSIONS)))


@pytest.fixture
def bare() -> Iterator[System]:
    with system_without_engines() as system:
        yield system


async def end(system: System, engine: JoinedEngine) -> None:
    """It drains, and the gateway does not see it any more."""
    assert await asyncio.to_thread(engine.end) == 0, engine.log.read_text()[-3000:]

    async def is_gone() -> bool:
        return engine.name not in await asyncio.to_thread(system.instances)

    await until_async(is_gone, PHASE_LIMIT_S)


async def test_a_change_from_one_version_to_another(
    bare: System, other: Path, questions: list[VersionedQuestion]
) -> None:
    """The old one has an instance that prefills and decodes, the new one a pair.

    No request fails, each answer is that of the version that it went to, and no tensor of one version is read
    by the other.
    """
    with ExitStack() as stack:
        old = joined_engines(bare, OLD, MODEL, TRIPTYCH_MODEL_VERSION="1")
        old_engines = await asyncio.to_thread(stack.enter_context, old)
        system = await asyncio.to_thread(stack.enter_context, another_gateway(bare, "gateway-0"))
        (url,) = inspection.gateway_urls(system, 1)
        async with asking(url, questions) as answers:
            await until_answered(answers, ["1"])
            new = joined_engines(bare, NEW, other, TRIPTYCH_MODEL_VERSION="2")
            await asyncio.to_thread(stack.enter_context, new)
            await until_answered(answers, ["1", "2"])
            old_digest = (await asyncio.to_thread(records_of, bare))["encoder-old"].namespace_digest
            for name in ("prefill_decode-old", "encoder-old"):
                await end(system, old_engines[name])
            num_before = len(answers)
            await until_answered(answers, ["2"])
        assert_right(answers)
        check(answers[num_before + NUM_CALLERS :], lambda answer: answer.is_right_of(["2"]))
        await asyncio.to_thread(check_requests, system, answers)
        await asyncio.to_thread(check_tensors, system)
        await asyncio.to_thread(check_end, system, url, old_digest)


def check_requests(system: System, answers: Sequence[Answer]) -> None:
    """Each was answered by the version that it was sent to, as its trace says."""
    wait_until(
        lambda: inspection.versions(system).keys() >= {answer.request_id for answer in answers},
        SPANS_LIMIT_S,
        "every request's span was written",
    )
    version_of = inspection.versions(system)
    check(answers, lambda answer: answer.is_right_of([version_of[answer.request_id]]))
    print("answers by version:", Counter(version_of[answer.request_id] for answer in answers))


def check_tensors(system: System) -> None:
    """Each was made and read by engines of one and the same version."""
    version_of = {name: version for version, names in VERSIONS.items() for name in names}
    of_items = users_of_items(system, version_of.__getitem__)
    assert {mm_hash: each for mm_hash, each in of_items.items() if len(each) > 1} == {}
    assert {version_of[name] for _, name in inspection.injections(system)} == VERSIONS.keys()


def users_of_items(system: System, of: Callable[[str], object]) -> dict[str, set[object]]:
    """By mm_hash: `of` each engine that has made it, or read it."""
    found: dict[str, set[object]] = defaultdict(set)
    for mm_hash, name in [*inspection.encodes(system), *inspection.injections(system)]:
        found[mm_hash].add(of(name))
    return found


def check_end(system: System, url: str, old_digest: str | None) -> None:
    """The old version is gone, and nothing is left of it, nor of any request."""
    assert records_of(system).keys() == {*NEW, "gateway-0"}
    wait_until(lambda: not left_over(system, url), IDLE_LIMIT_S, "nothing is left over")
    assert old_digest is not None
    with redis.Redis.from_url(inspection.redis_url(system), decode_responses=True) as client:
        of_old = [key for key in client.scan_iter() if old_digest in key or any(name in key for name in OLD)]
        assert [key for key in of_old if client.ttl(key) < 0] == []


def left_over(system: System, url: str) -> dict[str, int]:
    """What must not be there when nothing is asked; empty: nothing."""
    found = store_leftovers(system.store_stats())
    found |= stream_leftovers(inspection.redis_url(system), DEPLOYMENT)
    found["requests"] = int(str(inspection.health(url)["num_requests"]))
    for name, record in records_of(system).items():
        if record.role not in (Role.ENCODE, Role.GATEWAY):
            engine = Instance(record)
            found |= {f"{name} {what}": int(engine.metric(f"vllm:num_requests_{what}")) for what in STATES}
            found[f"{name} holds KV blocks"] = int(engine.holds_kv_blocks)
    return {what: number for what, number in found.items() if number}


# ---- two models ----------------------------------------------------------------------------------
def test_two_models_side_by_side(other: Path, questions: list[VersionedQuestion], tmp_path: Path) -> None:
    """As in docs/reference/configuration.md: beside a system that `up` has started, with a file of models."""
    models = tmp_path / "models.yaml"
    models.write_text(yaml.safe_dump({"aliases": {ALIAS: OTHER_MODEL}}))
    exact = " ".join(EXACT)
    with (
        running_system(
            f"--encoder-args={exact}", f"--prefill-decode-args={exact}",
            TRIPTYCH_MODELS_FILE=str(models), is_forked=True,
        ) as system,
        joined_engines(system, SECOND, other, TRIPTYCH_SERVED_MODEL_NAME=OTHER_MODEL),
    ):  # fmt: skip
        (url,) = inspection.gateway_urls(system, 1)
        wait_until(
            lambda: names_of_models(url) == {MODEL.name, OTHER_MODEL, ALIAS}, START_LIMIT_S, "both are listed"
        )
        served = [(MODEL.name, "1"), (OTHER_MODEL, "2"), (ALIAS, "2")]
        with ThreadPoolExecutor(NUM_ASKED_AT_ONCE) as pool:
            asking_all = [
                (question, model, version, pool.submit(ask, url, question, model))
                for question in questions
                for model, version in served
            ]
            for question, model, version, answer in asking_all:
                assert answer.result() == list(question.by_version[version]), (question.text, model)
        images = {image for question in questions for image in question.images}
        wait_until(
            lambda: len(read_items(system)) == 2 * len(images), SPANS_LIMIT_S, "each model reads each image"
        )
        assert sum(name in SECOND for _, name in read_items(system)) == len(images)
        assert all(len(each) == 1 for each in users_of_items(system, SECOND.__contains__).values())


def read_items(system: System) -> set[tuple[str, str]]:
    """(mm_hash, instance). One that is asked about twice at the same time may be read twice."""
    return set(inspection.injections(system))


def names_of_models(url: str) -> set[str]:
    listed = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
    return {card["id"] for card in listed}


def ask(url: str, question: VersionedQuestion, model: str) -> list[int]:
    """The answer's tokens."""
    body = {**question.body(), "model": model, "stream": False}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=CLIENT_LIMIT_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
