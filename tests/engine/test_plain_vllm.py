"""Plain vLLM engines with a store: stock scheduler, a proxy that encodes first, none of our services."""

import contextlib
import signal
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from tests.support.real.plain import PlainSystem, running_plain
from tests.support.real.system import Server, image_part
from tests.support.waiting import wait_until
from triptych_common.domain.errors import StoreFullError
from triptych_common.protocol.store import Reserve, TensorSpec
from triptych_common.store_session import StoreSession

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}
BLOCK_BYTES = 64 << 10


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainSystem]:
    with running_plain(tmp_path_factory.mktemp("plain")) as running:
        yield running


@pytest.fixture
def images(strips: ModuleType, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """New ones for each test, as parts of a message."""
    seed = 7000 + sum(map(ord, request.node.name))
    return [image_part(each.png) for each in strips.held_out_strips(4, length=None, seed=seed)]


def assert_equal_answers(one: Server, other: Server, content: list[dict[str, Any]]) -> None:
    answer, expected = one.ask(content), other.ask(content)
    assert answer.token_ids == expected.token_ids, f"{answer.text!r}, expected {expected.text!r}"


def encode_at(plain: PlainSystem, image: dict[str, Any]) -> None:
    """The first half of vLLM's proxy: the encoder gets the image as it came."""
    plain.encoder.ask([image], max_tokens=1)


def is_saved(plain: PlainSystem, image: dict[str, Any]) -> bool:
    """After the encoder was asked for it, by a store that had sealed nothing."""
    encode_at(plain, image)
    return plain.store.stats().num_seals_total > 0


def empty_encoder_cache(server: Server) -> None:
    url = server.base_url.removesuffix("/v1") + "/reset_encoder_cache"
    httpx.post(url, trust_env=False).raise_for_status()


def fill(session: StoreSession) -> None:
    """Every block that can be had is reserved, and never sealed."""
    spec = TensorSpec(shape=(BLOCK_BYTES // 4, 1), dtype="float32", num_bytes=BLOCK_BYTES)
    with contextlib.suppress(StoreFullError):
        for number in range(1000):
            session.request(Reserve(seq=0, mm_hash=f"{number:064x}", spec=spec))
        pytest.fail("the store is not full")


def test_answers_equal_those_of_one_engine(
    plain: PlainSystem, monolith: Server, images: list[dict[str, Any]]
) -> None:
    before = plain.store.stats()
    for content in (
        [QUESTION],
        [images[0], QUESTION],
        [images[1], QUESTION, images[2]],
        [QUESTION, images[3], images[3]],
    ):
        assert_equal_answers(plain.proxy, monolith, content)
    after = plain.store.stats()
    assert after.num_seals_total - before.num_seals_total == len(images)
    assert after.num_hits_total - before.num_hits_total >= len(images)


def test_a_known_image_is_not_encoded_again(
    plain: PlainSystem, monolith: Server, images: list[dict[str, Any]]
) -> None:
    image = images[0]
    assert_equal_answers(plain.proxy, monolith, [image, QUESTION])
    first = plain.store.stats()
    assert_equal_answers(plain.proxy, monolith, [{"type": "text", "text": "again"}, image, QUESTION])
    assert plain.store.stats().num_seals_total == first.num_seals_total
    # Neither is it by an encoder that does not have it any more: it loads what the store has.
    empty_encoder_cache(plain.encoder)
    again = plain.store.stats()
    assert_equal_answers(plain.proxy, monolith, [{"type": "text", "text": "more"}, image, QUESTION])
    last = plain.store.stats()
    assert (last.num_seals_total, last.num_misses_total) == (again.num_seals_total, again.num_misses_total)
    assert last.num_hits_total > again.num_hits_total


def test_the_same_image_is_found_by_vllms_own_hash(
    plain: PlainSystem, monolith: Server, images: list[dict[str, Any]]
) -> None:
    """As a router has it that sends the whole request to both engines, media included."""
    encode_at(plain, images[0])
    before = plain.store.stats()
    assert_equal_answers(plain.prefill_decode, monolith, [images[0], QUESTION])
    after = plain.store.stats()
    assert after.num_hits_total == before.num_hits_total + 1
    assert after.num_misses_total == before.num_misses_total


def test_an_image_that_the_store_does_not_have_is_encoded_where_it_is_needed(
    plain: PlainSystem, monolith: Server, images: list[dict[str, Any]]
) -> None:
    before = plain.store.stats()
    assert_equal_answers(plain.prefill_decode, monolith, [images[0], QUESTION])
    after = plain.store.stats()
    assert after.num_misses_total > before.num_misses_total
    assert after.num_seals_total == before.num_seals_total  # a consumer saves nothing


def test_with_a_full_store_engines_encode_for_themselves(
    plain: PlainSystem, monolith: Server, images: list[dict[str, Any]]
) -> None:
    with closing(plain.store.connect("filler")) as session:
        fill(session)
        encode_at(plain, images[0])
        assert_equal_answers(plain.prefill_decode, monolith, [images[0], QUESTION])
    wait_until(lambda: plain.store.stats().num_reservations == 0, 10, "the reservations are gone")
    assert_equal_answers(plain.proxy, monolith, [images[1], QUESTION])


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_a_store_that_is_away_and_comes_back(
    plain: PlainSystem, monolith: Server, images: list[dict[str, Any]], with_signal: signal.Signals
) -> None:
    """With a new region, or with the one that it had: images known and new, with media and without."""
    known, new, later, lost = images
    assert_equal_answers(plain.proxy, monolith, [known, QUESTION])
    plain.store.stop(with_signal)
    assert_equal_answers(plain.prefill_decode, monolith, [new, QUESTION])
    with pytest.raises(openai.APIStatusError):  # metadata alone: there is nothing to encode
        plain.proxy.ask([lost, QUESTION])
    plain.store.start()
    wait_until(lambda: is_saved(plain, later), 15, "the encoder has found the store")
    assert_equal_answers(plain.proxy, monolith, [later, QUESTION, known])
    assert_equal_answers(plain.proxy, monolith, [lost, QUESTION])
    assert "EngineDeadError" not in plain.prefill_decode.log.read_text()


def test_nothing_stays_pinned_but_what_the_encoder_caches_have(
    plain: PlainSystem, images: list[dict[str, Any]]
) -> None:
    plain.proxy.ask([images[0], QUESTION])
    assert plain.store.stats().num_pins > 0
    empty_encoder_cache(plain.encoder)
    empty_encoder_cache(plain.prefill_decode)
    plain.prefill_decode.ask([QUESTION])
    stats = plain.store.stats
    wait_until(lambda: stats().num_pins == 0, 10, "every view is gone, and its pin")
    assert (stats().num_reservations, stats().num_watches) == (0, 0)
