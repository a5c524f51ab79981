"""Requests to two servers, and their answers beside each other."""

from typing import Any

import httpx
import pytest

from tests.support.real.system import MODEL, Server


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    """A raw request, for the served model unless the body names another one, or none."""
    url = server.base_url.removesuffix("/v1") + path
    named = {"model": MODEL.name, **body}
    sent = {name: value for name, value in named.items() if name != "model" or value is not None}
    return httpx.post(url, json=sent, timeout=120, trust_env=False)


def alike(one: Any, other: Any) -> bool:
    """The same JSON, with numbers that were computed alike."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, abs=1e-3)
    return bool(one == other)
