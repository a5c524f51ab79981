"""Every endpoint of the table, over HTTP: served, guarded by keys, described; and what is refused."""

import asyncio
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL
from tests.support.gateway.system import System, opened_system
from triptych_gateway.endpoints.endpoint import BodyForm, ChatForm, Endpoint
from triptych_gateway.endpoints.openapi import statuses_of
from triptych_gateway.endpoints.table import ENDPOINTS, FORWARDED

WITH_KEY = [{"api_keys": ("secret",)}]


def url_of(endpoint: Endpoint) -> str:
    path = endpoint.shown_path
    for name in endpoint.parameters:
        path = path.replace(f"{{{name}}}", MODEL if name == "model" else "unknown")
    return path


# All that is forwarded and has a body of JSON; forms are in chat/test_sounds.py.
WITH_BODY = [endpoint for endpoint in FORWARDED if endpoint.form is BodyForm.JSON]


def body_of(endpoint: Endpoint) -> dict[str, Any]:
    """A small one that is valid."""
    text: Any = "a"
    if endpoint.path == "/v1/chat/completions/batch":
        text = [[{"role": "user", "content": "a"}]]
    elif endpoint.takes_media:
        text = [{"role": "user", "content": "a"}]
    elif endpoint.path == "/detokenize":
        text = [1]
    return {"model": MODEL, endpoint.inputs[0]: text} if endpoint.inputs else {}


async def answers_of(system: System, endpoint: Endpoint, **options: Any) -> list[httpx.Response]:
    """One for each of its methods."""
    if endpoint.form is BodyForm.JSON:
        options["json"] = body_of(endpoint)
    return [await system.http.request(method, url_of(endpoint), **options) for method in endpoint.methods]


def has_code(endpoint: Endpoint, answer: httpx.Response, code: str) -> bool:
    """Whether it is the error of this code; Anthropic's form has none."""
    body = answer.json()
    if endpoint.chat_form is ChatForm.MESSAGES:
        return set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    return bool(body["error"]["code"] == code)


async def test_every_endpoint_is_routed_and_answers_as_described(system: System) -> None:
    for endpoint in ENDPOINTS:
        for answer in await answers_of(system, endpoint):
            case = f"{endpoint.path}: {answer.status_code} {answer.text[:200]}"
            code = answer.json()["error"]["code"] if answer.status_code >= 400 else None
            assert code not in ("not_found", "method_not_allowed", "internal_error"), case
            assert answer.status_code in {200, *statuses_of(endpoint)}, case
            kind = answer.headers.get("content-type", "").partition(";")[0]
            assert answer.status_code != 200 or kind == endpoint.answer_type, case


async def test_other_methods_are_refused(system: System) -> None:
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(url_of(endpoint), []).append(endpoint)
    for path, endpoints in by_path.items():
        for method in {"GET", "POST", "PUT", "DELETE"}.difference(*(each.methods for each in endpoints)):
            answer = await system.http.request(method, path)
            assert answer.status_code == 405, path
            assert has_code(endpoints[0], answer, "method_not_allowed"), path


@pytest.mark.parametrize("system", WITH_KEY, indirect=True)
async def test_keys_are_checked_where_the_table_says(system: System) -> None:
    for endpoint in ENDPOINTS:
        for answer in await answers_of(system, endpoint):
            refused = answer.status_code == 401 and has_code(endpoint, answer, "missing_api_key")
            assert refused == endpoint.needs_key, f"{endpoint.path}: {answer.status_code}"
        for answer in await answers_of(system, endpoint, headers={"Authorization": "Bearer secret"}):
            assert answer.status_code != 401, endpoint.path
    assert set(system.prefill_decode.paths) == {  # what it serves, with the key
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/detokenize",
        "/v1/responses",
    }
    assert system.prefill_decode.tokenized


async def test_what_is_described_is_what_is_served(system: System) -> None:
    description = (await system.http.get("/openapi.json")).json()
    assert description["info"]["version"] == version("triptych-gateway")
    assert set(description["paths"]) == {endpoint.shown_path for endpoint in ENDPOINTS}
    page = await system.http.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "/v1/completions" in page.text


async def test_version(system: System) -> None:
    assert (await system.http.get("/version")).json() == {"version": version("triptych-gateway")}


async def test_health_follows_what_is_served(system: System) -> None:
    for path in ("/health", "/ping"):
        answer = await system.http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    await system.gateway.registration.announce_draining()
    answer = await system.http.get("/health")
    assert (answer.status_code, answer.content) == (503, b"")
    assert (await system.http.post("/ping")).status_code == 503


async def test_one_model(system: System) -> None:
    assert (await system.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    unknown = await system.http.get("/v1/models/some/other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


# ---- what holds for all that is forwarded -----------------------------------------------------------
async def test_what_the_model_does_not_serve_is_a_clean_404(system: System) -> None:
    pooling = [endpoint for endpoint in FORWARDED if endpoint.kind == "pool"]
    assert len(pooling) == 8
    for endpoint in pooling:
        (answer,) = await answers_of(system, endpoint)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "endpoint_not_served", "model")
        assert endpoint.path in error["message"]


async def test_a_pooling_models_endpoints_are_forwarded(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path, FakePrefillDecode(pools=True)) as system:
        for endpoint in FORWARDED:
            if endpoint.kind == "pool":
                (answer,) = await answers_of(system, endpoint)
                assert answer.json()["sent"] == body_of(endpoint)
                assert system.prefill_decode.paths[-1] == endpoint.path
        made = await system.openai.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
        assert made.object == "list"


async def test_unknown_models_are_404_everywhere(system: System) -> None:
    for endpoint in WITH_BODY:
        answer = await system.http.post(endpoint.path, json=body_of(endpoint) | {"model": "other"})
        assert answer.status_code == 404, endpoint.path
        assert has_code(endpoint, answer, "model_not_found"), endpoint.path


async def test_media_are_refused_by_name_everywhere_but_in_single_chats(system: System) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    for endpoint in WITH_BODY:
        if endpoint.takes_media:
            continue
        name = endpoint.inputs[-1]
        answer = await system.http.post(endpoint.path, json={"model": MODEL, name: [message]})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_content_part"), endpoint.path
        assert error["param"] == f"{name}[0].content[1]"
    assert system.prefill_decode.bodies == system.prefill_decode.tokenized == []


@pytest.mark.parametrize("system", [{"max_body_bytes": 4000, "max_body_values": 100}], indirect=True)
async def test_bodies_are_bounded_everywhere(system: System) -> None:
    for endpoint in WITH_BODY:
        large = await system.http.post(endpoint.path, content=b'{"model": "' + b"x" * 4000 + b'"}')
        assert large.status_code == 413
        assert has_code(endpoint, large, "body_too_large")
        many = await system.http.post(endpoint.path, json=body_of(endpoint) | {"more": [[]] * 200})
        assert many.status_code == 400
        assert has_code(endpoint, many, "body_too_complex")
        broken = await system.http.post(endpoint.path, content=b"{")
        assert broken.status_code == 400
        assert has_code(endpoint, broken, "invalid_json")


@pytest.mark.parametrize("system", [{"max_requests_in_flight": 1}], indirect=True)
async def test_places_are_bounded_over_all_endpoints(system: System) -> None:
    with system.gateway.services.access.limiter.hold_request():
        for endpoint in FORWARDED:
            (answer,) = await answers_of(system, endpoint)
            assert answer.status_code == 429
            assert has_code(endpoint, answer, "too_many_requests")
            assert answer.headers["retry-after"] == "1"


async def test_answers_are_counted_by_endpoint(system: System) -> None:
    await answers_of(system, next(each for each in FORWARDED if each.path == "/v1/completions"))
    await system.http.post("/tokenize", content=b"{")
    metrics = (await system.http.get("/metrics")).text
    assert 'triptych_gateway_requests_total{route="/v1/completions",status="200"} 1.0' in metrics
    assert 'triptych_gateway_requests_total{route="/tokenize",status="400"} 1.0' in metrics


pytestmark = pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 540


@pytest.mark.parametrize(
    "options", [("5",), pytest.param(("50", "--new"), marks=pytest.mark.long)], ids=["few", "many"]
)
async def test_every_operation_answers_as_described(
    redis_url: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    fake = FakePrefillDecode(pools=True)
    async with opened_system(redis_url, tmp_path, fake, files_dir=tmp_path / "files") as system:
        url = system.gateway.settings.local_urls[0]
        command = [sys.executable, "-m", "tests.support.gateway.described_api", url, *options]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        description = (await system.http.get("/openapi.json")).json()
        assert int(done.stdout.split()[-1]) == sum(len(methods) for methods in description["paths"].values())
        assert fake.bodies, "some of them are valid"
