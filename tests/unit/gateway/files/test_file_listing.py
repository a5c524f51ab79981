"""Pages of a key's files, as OpenAI's API has them."""

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.files.file_record import (
    FileRecord,
    ListQuery,
    Purpose,
    is_file_id,
    new_file_id,
    page_of,
)


def record(number: int, purpose: Purpose = "vision", created: int = 0) -> FileRecord:
    return FileRecord(
        file_id=f"file-{number:032x}",
        filename="a",
        purpose=purpose,
        num_bytes=1,
        created_ns=created,
        expires_at=1,
        media_digest="0" * 64,
        modalities=(Modality.IMAGE,),
    )


RECORDS = [record(number, "vision" if number % 2 else "user_data", number // 3) for number in range(10)]


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 3, 10, 50])
def test_pages_join_to_the_whole_list(order: str, limit: int) -> None:
    """Also where several files were made at the same time."""
    found: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = page_of(RECORDS, ListQuery.parse({"limit": str(limit), "order": order} | after))
        found += [each["id"] for each in page["data"]]
        assert page["last_id"] == found[-1]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    ids = [each.file_id for each in RECORDS]
    assert found == (ids if order == "asc" else ids[::-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "10001"),
        ("limit", "x"),
        ("limit", "²"),
        ("order", "ASC"),
        ("purpose", "x"),
        ("after", "file-x"),
    ],
)
def test_bad_parameters(name: str, value: str) -> None:
    with pytest.raises(RequestError) as raised:
        ListQuery.parse({name: value})
    assert (raised.value.status_code, raised.value.param) == (400, name)


@pytest.mark.parametrize(("order", "numbers"), [("asc", [5, 6]), ("desc", [3, 2])])
def test_after_a_file_that_is_gone(order: str, numbers: list[int]) -> None:
    left = [each for each in RECORDS if each is not RECORDS[4]]
    query = ListQuery.parse({"after": RECORDS[4].file_id, "order": order, "limit": "2"})
    assert [each["id"] for each in page_of(left, query)["data"]] == [RECORDS[n].file_id for n in numbers]


@pytest.mark.parametrize(
    "text", ["", "file-", "lock", "../x", "file-" + "0" * 31, "file-" + "0" * 33, "file-" + "0" * 32 + "\n",
             "file-" + "A" * 32, "file-" + "٠" * 32, "xfile-" + "0" * 32]
)  # fmt: skip
def test_what_is_no_id(text: str) -> None:
    assert not is_file_id(text)


def test_new_ids() -> None:
    made = {new_file_id(5) for _ in range(100)}
    assert len(made) == 100
    assert all(map(is_file_id, made))
    assert new_file_id(4 << 40) < min(new_file_id(each << 40) for each in (5, 50, 500))
