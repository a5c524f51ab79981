"""`file://`: only regular files below the root, by no link and no race."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.gateway.fetching import code_of, fetch, fetching, refusal
from triptych_gateway.fetch.fetcher import MediaFetcher

NOT_ALLOWED = {(400, "url_not_allowed"), (400, "invalid_image_url")}
FAILED = (400, "media_fetch_failed")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With files, folders, links and devices below it, and a secret beside it."""
    root = tmp_path / "media"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "a.png").write_bytes(b"a")
    (root / "deep" / "er" / "b c.png").write_bytes(b"b")
    (root / "ü%.png").write_bytes(b"u")
    (root / "large").write_bytes(bytes(100_001))
    (root / "full").write_bytes(bytes(100_000))
    (tmp_path / "private").write_bytes(b"secret")
    (tmp_path / "media-not").mkdir()
    (tmp_path / "media-not" / "x").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "private")
    (root / "inner-link").symlink_to(root / "a.png")
    (root / "folder-link").symlink_to(tmp_path)
    os.mkfifo(root / "fifo")
    return root


@pytest.fixture
async def fetcher(root: Path) -> AsyncIterator[MediaFetcher]:
    async with fetching(fetch_file_root=root, fetch_urls=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", b"a"),
        ("%61.png", b"a"),
        ("deep/er/b%20c.png", b"b"),
        ("%C3%BC%25.png", b"u"),
        ("ü%25.png", b"u"),
        ("full", bytes(100_000)),
    ],
)
async def test_files_below_the_root(fetcher: MediaFetcher, root: Path, name: str, content: bytes) -> None:
    grown: list[int] = []
    assert await fetch(fetcher, f"file://{root}/{name}", on_growth=grown.append) == content
    assert await fetch(fetcher, f"FILE://localhost{root}/{name}") == content
    assert grown == [len(content)]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../private",
            "%2e%2e/private",
            "deep/../../private",
            "deep/%2E%2E/%2e./private",
            "./a.png",
            "deep//a",
        ),
        *(
            "..%2fprivate",
            "%2e%2e%2fprivate",
            "/a.png",
            "",
            "a.png/",
            "a.png%00.txt",
            "a.png?x",
            "a.png#x",
            "\n",
        ),
        "/".join("d" * 100),
    ],
)
async def test_paths_that_are_not_allowed(fetcher: MediaFetcher, root: Path, name: str) -> None:
    assert code_of(await refusal(fetcher, f"file://{root}/{name}")) in NOT_ALLOWED


@pytest.mark.parametrize(
    "name",
    ["link", "inner-link", "folder-link/private", "deep", "fifo", "missing", "a.png/x", "%252e%252e/private"],
)
async def test_what_is_no_file_below_the_root(fetcher: MediaFetcher, root: Path, name: str) -> None:
    error = await refusal(fetcher, f"file://{root}/{name}")
    assert code_of(error) == FAILED
    assert error.message.endswith("it is no file that can be read")  # for all alike


@pytest.mark.parametrize(
    "url",
    [
        *(
            "file:///etc/passwd",
            "file://{root}",
            "file://{root}/",
            "file://{root}-not/x",
            "file:///",
            "file:",
            "file:/x",
        ),
        *(
            "file://{parent}/private",
            "file://other.host{root}/a.png",
            "file://127.0.0.1{root}/a.png",
            "file://a.png",
        ),
        *(
            "file:{root}/a.png",
            "file:///proc/self/environ",
            "file:///dev/zero",
            "file://user@localhost{root}/a.png",
        ),
        "file:///" + "a" * 9000,
    ],
)
async def test_outside_the_root(fetcher: MediaFetcher, root: Path, url: str) -> None:
    error = await refusal(fetcher, url.format(root=root, parent=root.parent))
    assert code_of(error) in NOT_ALLOWED
    assert str(root) not in error.message


async def test_too_large(fetcher: MediaFetcher, root: Path) -> None:
    assert code_of(await refusal(fetcher, f"file://{root}/large")) == (413, "media_too_large")


async def test_a_folder_that_becomes_a_link(fetcher: MediaFetcher, root: Path) -> None:
    """Accepted, and then replaced: what is opened counts."""
    url = f"file://{root}/deep/private"
    accepted = fetcher.accept(url, "here")
    (root / "deep").rename(root / "gone")
    (root / "deep").symlink_to(root.parent)
    assert accepted == fetcher.accept(url, "here")
    assert code_of(await refusal(fetcher, url)) == FAILED


async def test_without_a_root(root: Path) -> None:
    async with fetching() as fetcher:
        error = await refusal(fetcher, f"file://{root}/a.png")
    assert code_of(error) == (400, "url_not_allowed")
    assert "no root is set" in error.message
