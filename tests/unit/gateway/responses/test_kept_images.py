"""Bytes of stored responses' images: kept while there is room, told by name when they are gone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import ImageProperties
from triptych_gateway.access.auth import ANONYMOUS
from triptych_gateway.responses.response_index import KeptImages, ResponseImage, ResponseRecord


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def image(name: str, num_bytes: int = 4) -> ResponseImage:
    properties = ImageProperties(format="PNG", width=2, height=3)
    return ResponseImage(media_digest=name * 64, num_bytes=num_bytes, image=properties)


async def test_the_least_used_go_first(threads: ThreadPoolExecutor) -> None:
    images = KeptImages(8, None, threads)
    for name in "ab":
        images.keep(name * 64, name.encode() * 4)
    await images.find(image("a"), ANONYMOUS, "resp_1")
    images.keep("c" * 64, b"cccc")
    images.keep("d" * 64, b"d" * 9)  # never fits
    for name in "ac":
        file = await images.find(image(name), ANONYMOUS, "resp_1")
        assert await file.fetch() == name.encode() * 4
        assert (file.num_bytes, file.media_digest, file.image and file.image.height) == (4, name * 64, 3)
    for name in "bd":
        with pytest.raises(RequestError) as raised:
            await (await images.find(image(name), ANONYMOUS, "resp_1")).fetch()
        assert (raised.value.status_code, raised.value.code) == (404, "response_image_gone")
        assert "resp_1" in raised.value.message


def test_records_are_small_and_come_back_as_they_were() -> None:
    record = ResponseRecord(
        instance="pd-0", boot_id="b" * 32, owner="o" * 32, model="m", images=(image("a"), image("b"))
    )
    text = record.model_dump_json(exclude_defaults=True)
    assert ResponseRecord.model_validate_json(text) == record
    assert len(text) < 800
