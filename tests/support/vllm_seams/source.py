"""Python source of a version of vLLM: the installed one, or a published one without its compiled parts.

A wheel for GPUs has 300 MB, of which the Python source is 12 MB in a few runs of the archive. The index's
server sends ranges of a file, so those runs alone are fetched, once, into a cache outside the checkout.
"""

import functools
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx

from triptych_vllm_connector.versions import vllm_version

LIMIT_S = 60.0
"""Limit of one fetch: a test is skipped rather than kept waiting."""
BLOCK_BYTES = 1 << 20
WANTED = (".py", ".jinja", ".json", "/METADATA", "/entry_points.txt")
LARGE_FOLDERS = ("/fused_moe/configs/", "/quantization/utils/configs/", "/third_party/deep_gemm/")


class SourceUnavailableError(Exception):
    """The index cannot be reached, has no such version, or is too slow."""


class RangeFile(io.RawIOBase):
    """File on a server, read by ranges."""

    def __init__(self, client: httpx.Client, url: str, check: Callable[[], None]) -> None:
        """`check` is called before each range and may raise."""
        self._client, self._url, self._check = client, url, check
        self._position = 0
        self._size = int(self._get(0, 0).headers["content-range"].rpartition("/")[2])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        last = min(self._position + len(buffer), self._size) - 1
        if last < self._position:
            return 0
        content = self._get(self._position, last).content
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _get(self, first: int, last: int) -> httpx.Response:
        self._check()
        response = self._client.get(self._url, headers={"Range": f"bytes={first}-{last}"})
        response.raise_for_status()
        if response.status_code != httpx.codes.PARTIAL_CONTENT:
            raise SourceUnavailableError("the package index does not send parts of a file")
        return response


def installed_source() -> Path:
    """Folder of the installed vLLM; imports nothing of it."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SourceUnavailableError("vLLM is not installed")
    return Path(spec.origin).parent


def source_of(release: str) -> Path:
    """Folder `vllm` of a release: the installed one, or as `published_source` has it."""
    return installed_source() if release == vllm_version() else published_source(release)


def published_source(version: str) -> Path:
    """Folder `vllm` of a published version, from the cache or the index, with its `dist-info` beside it.

    Raises:
        SourceUnavailableError: it cannot be had within `LIMIT_S`.
    """
    place = cache_folder() / version
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as made:
            try:
                _fetch(version, Path(made))
            except (httpx.HTTPError, OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
                raise SourceUnavailableError(f"vLLM {version} cannot be fetched: {error!r}") from error
            unpacked = Path(made).rename(place.with_suffix(f".{os.getpid()}"))
            try:
                unpacked.rename(place)
            except OSError:  # another process was first
                shutil.rmtree(unpacked)
            Path(made).mkdir()  # the context removes it
    return place / "vllm"


def cache_folder() -> Path:
    """Folder of fetched sources, outside the checkout."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "triptych" / "vllm-source"


def _fetch(version: str, into: Path) -> None:
    deadline = time.monotonic() + LIMIT_S

    def check() -> None:
        if time.monotonic() > deadline:
            raise SourceUnavailableError(f"vLLM {version} was not fetched within {LIMIT_S:.0f} s")

    with httpx.Client(follow_redirects=True, timeout=10.0) as client:
        url = _wheel_url(client, version)
        file = io.BufferedReader(RangeFile(client, url, check), BLOCK_BYTES)
        with zipfile.ZipFile(file) as wheel:
            for entry in sorted(wheel.infolist(), key=lambda each: each.header_offset):
                name = entry.filename
                if name.endswith(WANTED) and not any(each in name for each in LARGE_FOLDERS):
                    wheel.extract(entry, into)


def _wheel_url(client: httpx.Client, version: str) -> str:
    """Address of a wheel of the version; the Python source is the same on each platform."""
    for index in _indexes():
        page = f"{index.rstrip('/')}/vllm/"
        try:
            response = client.get(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
            response.raise_for_status()
            files = response.json()["files"]
        except (httpx.HTTPError, ValueError):
            continue
        for each in files:
            if each["filename"].startswith(f"vllm-{version}-") and each["filename"].endswith(".whl"):
                return str(urljoin(str(response.url), each["url"]))
    raise SourceUnavailableError(f"no package index of pip's has a wheel of vLLM {version}")


@functools.cache
def _indexes() -> tuple[str, ...]:
    """Package indexes of pip's configuration that are on the network."""
    command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    listed = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    options = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = value.strip("'\"")
    found = [options.get("index-url") or _pips_own_index(), *options.get("extra-index-url", "").split()]
    return tuple(each for each in found if urlsplit(each).scheme in ("http", "https"))


def _pips_own_index() -> str:
    """Return the index that pip takes without a configuration. Imported here, pip would replace distutils."""
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def runnable(release: str) -> Iterator[Path]:
    """Folder for `PYTHONPATH` with the Python source of a release and the installed compiled parts.

    It runs vLLM's Python code as published, on a CPU, over kernels and torch of the installed release.
    """
    source, installed = published_source(release), installed_source()
    with tempfile.TemporaryDirectory(prefix="vllm-") as made:
        package = Path(made) / "vllm"
        package.mkdir()
        for part in (*source.iterdir(), *installed.glob("*.so")):
            (package / part.name).symlink_to(part)
        info = Path(made) / f"vllm-{release}+cpu.dist-info"
        shutil.copytree(source.parent / f"vllm-{release}.dist-info", info)
        metadata = info / "METADATA"
        # vLLM takes its platform from the version of its distribution.
        metadata.write_text(
            metadata.read_text().replace(f"\nVersion: {release}\n", f"\nVersion: {release}+cpu\n")
        )
        yield Path(made)
