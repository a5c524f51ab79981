"""The table of endpoints holds together, and the API's description says what it says."""

import json
import subprocess
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from triptych_gateway.endpoints.endpoint import BodyForm, ChatForm, Endpoint, EndpointKind
from triptych_gateway.endpoints.openapi import describe_api, statuses_of
from triptych_gateway.endpoints.table import ENDPOINTS, FORWARDED, chat_form_of, serves_callers
from triptych_gateway.routes.docs import PAGE_HEADERS, render_page

OPERATIONS = [(endpoint, method) for endpoint in ENDPOINTS for method in endpoint.methods]
NO_KEY = {
    "/health", "/ping", "/health/live", "/health/ready", "/version", "/metrics", "/openapi.json", "/docs",
    "/ui", "/ui/{file}",
}  # fmt: skip


@pytest.fixture(scope="module")
def description() -> dict[str, Any]:
    """As a client reads it."""
    read: dict[str, Any] = json.loads(json.dumps(describe_api(ENDPOINTS, "1.2.3")))
    return read


WITH_BODY = [endpoint for endpoint in FORWARDED if endpoint.kind is not EndpointKind.STORED]


@pytest.mark.parametrize("endpoint", WITH_BODY, ids=lambda each: each.path)
def test_what_is_forwarded_is_described_whole(endpoint: Endpoint) -> None:
    assert endpoint.needs_key
    assert endpoint.methods == ("POST",)
    if endpoint.form is BodyForm.JSON:
        assert endpoint.body is not None
    else:
        assert set(endpoint.required) <= set(endpoint.passed_fields), "the only ones that are taken"
    assert endpoint.inputs, "the fields in which media are looked for"
    assert set(endpoint.inputs) <= set(endpoint.passed_fields)
    assert not set(endpoint.refused_fields) & set(endpoint.passed_fields)
    assert serves_callers(endpoint.path)


def test_keys_are_needed_everywhere_but_for_status_and_description() -> None:
    assert {endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_key} == NO_KEY
    assert not any(map(serves_callers, NO_KEY))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.path)
def test_errors_have_the_form_of_their_path(endpoint: Endpoint, description: dict[str, Any]) -> None:
    forms = (chat_form_of(endpoint.path), endpoint.chat_form)
    assert len({form is ChatForm.MESSAGES for form in forms}) == 1
    responses = description["paths"][endpoint.shown_path][endpoint.methods[0].lower()]["responses"]
    wanted = "MessagesErrorAnswer" if endpoint.chat_form is ChatForm.MESSAGES else "ErrorAnswer"
    assert ("400" in responses) == ("400" in map(str, statuses_of(endpoint)))
    for status in statuses_of(endpoint) if endpoint.needs_key else ():
        schema = responses[str(status)]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{wanted}"}


@pytest.mark.parametrize(("endpoint", "method"), OPERATIONS, ids=lambda each: getattr(each, "path", each))
def test_the_description_has_every_operation(
    endpoint: Endpoint, method: str, description: dict[str, Any]
) -> None:
    operation = description["paths"][endpoint.shown_path][method.lower()]
    assert operation["summary"] == endpoint.summary
    assert set(operation["responses"]) == {"200", *map(str, statuses_of(endpoint))}
    assert ("security" in operation) == endpoint.needs_key == ("401" in operation["responses"])
    takes_plain_key = {"plain_api_key": []} in operation.get("security", ())
    assert takes_plain_key == (endpoint.chat_form is ChatForm.MESSAGES)
    assert ("requestBody" in operation) == (endpoint.form is not BodyForm.NONE)
    named = {each["name"] for each in operation.get("parameters", ())}
    assert named == {*endpoint.parameters, *endpoint.query}
    if endpoint.is_forwarded:
        assert {"400", "404", "413", "429", "503"} <= set(operation["responses"])
    content = operation["responses"]["200"].get("content", {})
    is_stream = endpoint.answer_type == "text/event-stream"
    assert ("text/event-stream" in content) == (endpoint.streams or is_stream)
    if "text/event-stream" in content:  # a schema is of each event, in this version of OpenAPI
        assert content["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/StreamedEvent"}


def test_its_schemas_are_schemas_and_all_references_lead_somewhere(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    text = json.dumps(description)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named
    assert named <= set(schemas)
    validator = Draft202012Validator({**schemas["ErrorAnswer"], "components": description["components"]})
    validator.validate({"error": {"message": "m", "type": "t", "param": None, "code": "c"}})
    assert list(validator.iter_errors({"detail": "Not Found"}))


def test_bodies_show_what_is_read_and_what_is_passed_on(description: dict[str, Any]) -> None:
    body = description["components"]["schemas"]["V1CompletionsBody"]
    assert {"model", "prompt", "stream", "n", "stop", "logprobs", "echo", "seed"} <= set(body["properties"])
    assert body["additionalProperties"] is True
    chat = description["components"]["schemas"]["V1ChatCompletionsBody"]
    assert set(chat["required"]) == {"messages"}


def test_the_page_has_no_scripts_and_names_no_other_origin() -> None:
    page = render_page(ENDPOINTS, "1.2.3")
    assert all(f"{endpoint.shown_path}</code>" in page for endpoint in ENDPOINTS)
    assert "1.2.3" in page
    assert not [word for word in ("<script", "src=", "http:", "https:", "//", "@import") if word in page]
    assert PAGE_HEADERS["Content-Security-Policy"].startswith("default-src 'none'")


def test_the_table_needs_no_engine() -> None:
    """Its schemas are had without vLLM, whose import takes seconds and gigabytes."""
    code = (
        "import sys, triptych_gateway.app;"
        "sys.exit(', '.join({'vllm', 'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
