"""Web pages of origins that the operator names may call the API; others may not, and nothing else is open."""

import httpx
import pytest

from tests.support.gateway.samples import MODEL
from tests.support.gateway.system import System

PAGE = "https://app.example.org"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
NAMED = {"cors_origins": (PAGE,), "api_keys": ("one",)}


async def preflight(system: System, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    return await system.http.options(path, headers=headers)


@pytest.mark.parametrize("system", [NAMED], indirect=True)
async def test_a_page_of_a_named_origin(system: System) -> None:
    asked = await preflight(system, PAGE)  # without a key, as browsers do
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in asked.headers
    headers = {"Origin": PAGE, "Authorization": "Bearer one"}
    answer = await system.post(BODY, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-ratelimit-remaining-requests" in answer.headers["access-control-expose-headers"]
    refused = await system.post(BODY, headers={"Origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == PAGE  # so that the page can read why
    streamed = await system.post(BODY | {"stream": True}, headers=headers)
    assert streamed.headers["access-control-allow-origin"] == PAGE
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("system", [NAMED], indirect=True)
async def test_other_pages_and_other_paths(system: System) -> None:
    other = await preflight(system, "https://evil.example.org")
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers
    for path in ("/metrics", "/health/ready"):
        answer = await system.http.get(path, headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("system", [{"cors_origins": ("*",)}], indirect=True)
async def test_any_page(system: System) -> None:
    assert (await preflight(system, "https://any.example.org")).headers["access-control-allow-origin"] == "*"


async def test_off_by_default(system: System) -> None:
    assert (await preflight(system, PAGE)).status_code == 405
    answer = await system.post(BODY, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]
