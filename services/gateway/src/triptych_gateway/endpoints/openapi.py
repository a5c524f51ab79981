"""OpenAPI 3.1 description of the API, made from the table of endpoints."""

import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from triptych_gateway.endpoints.endpoint import BodyForm, ChatForm, Endpoint, Schema
from triptych_gateway.endpoints.local_endpoints import ErrorAnswer, MessagesErrorAnswer, StreamedEvent

OPENAPI_VERSION = "3.1.0"
TITLE = "Triptych"
ABOUT = (
    "Endpoints that are forwarded are those of vLLM's server, with all of their fields but those that callers"
    " may not set; the fields shown here are the usual ones. Errors are in OpenAI's form, those"
    " of the Messages API in Anthropic's."
)
# What may become of a request that is forwarded, besides its answer.
FORWARDED_ERRORS = (400, 404, 408, 413, 422, 429, 500, 501, 502, 503, 504)
_KEY = "api_key"
_PLAIN_KEY = "plain_api_key"
_REF = "#/components/schemas/{model}"


def describe_api(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    errors = {
        ChatForm.COMPLETIONS: _schema_of(ErrorAnswer, schemas),
        ChatForm.RESPONSES: _schema_of(ErrorAnswer, schemas),
        ChatForm.MESSAGES: _schema_of(MessagesErrorAnswer, schemas),
    }
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        for method in endpoint.methods:
            operation = _describe(endpoint, method, errors[endpoint.chat_form], schemas)
            paths.setdefault(endpoint.shown_path, {})[method.lower()] = operation
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": TITLE, "version": version, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                _KEY: {"type": "http", "scheme": "bearer"},
                _PLAIN_KEY: {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def statuses_of(endpoint: Endpoint) -> list[int]:
    statuses = {*endpoint.error_statuses, *(FORWARDED_ERRORS if endpoint.is_forwarded else ())}
    return sorted({*statuses, *((401,) if endpoint.needs_key else ()), 500})


def operation_id(endpoint: Endpoint, method: str) -> str:
    """Return an id like `post_v1_chat_completions`."""
    return "_".join([method.lower(), *re.findall(r"\w+", endpoint.shown_path)])


def _describe(endpoint: Endpoint, method: str, error: Schema, schemas: dict[str, Any]) -> dict[str, Any]:
    places: list[tuple[str, str, Schema]] = [
        ("path", name, {"type": "string"}) for name in endpoint.parameters
    ]
    places += [("query", name, schema) for name, schema in endpoint.query.items()]
    operation: dict[str, Any] = {
        "operationId": operation_id(endpoint, method),
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "responses": {"200": _answer(endpoint, schemas)}
        | {str(status): _error(endpoint, status, error, schemas) for status in statuses_of(endpoint)},
    }
    if places:
        operation["parameters"] = [
            {"in": place, "name": name, "required": place == "path", "schema": schema}
            for place, name, schema in places
        ]
    if endpoint.form is not BodyForm.NONE:
        operation["requestBody"] = {"required": True, "content": _body(endpoint, schemas)}
    if endpoint.needs_key:
        shown_plain = endpoint.chat_form is ChatForm.MESSAGES
        schemes = (_KEY, _PLAIN_KEY) if shown_plain else (_KEY,)
        operation["security"] = [*({each: []} for each in schemes), {}]  # keys may not be configured
    return operation


def _body(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    if endpoint.form is BodyForm.FORM:
        schema = {
            "type": "object",
            "properties": dict(endpoint.passed_fields),
            "required": list(endpoint.required),
        }
        return {"multipart/form-data": {"schema": schema}}
    own = {} if endpoint.body is None else endpoint.body.model_json_schema(ref_template=_REF)
    schemas.update(own.pop("$defs", {}))
    # What the gateway reads, and what it passes on: one body. The second has the better words for both.
    name = "".join(word.capitalize() for word in re.findall(r"\w+", endpoint.path)) + "Body"
    schemas[name] = own | {
        "title": name,
        "description": endpoint.summary,
        "properties": {**own.get("properties", {}), **endpoint.passed_fields},
    }
    return {"application/json": {"schema": {"$ref": _REF.format(model=name)}}}


def _answer(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    if not endpoint.answer_type:
        return {"description": "OK"}
    content = {endpoint.answer_type: {"schema": _schema_of(endpoint.answer, schemas)}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": _schema_of(StreamedEvent, schemas)}
    return {"description": "OK", "content": content}


def _error(endpoint: Endpoint, status: int, error: Schema, schemas: dict[str, Any]) -> dict[str, Any]:
    phrase = HTTPStatus(status).phrase
    if status == HTTPStatus.SERVICE_UNAVAILABLE and not endpoint.needs_key:  # a report, as its good answer
        return _answer(endpoint, schemas) | {"description": phrase}
    return {"description": phrase, "content": {"application/json": {"schema": error}}}


def _schema_of(answer: type[BaseModel] | Schema | None, schemas: dict[str, Any]) -> Schema:
    if answer is None:
        return {}
    if not isinstance(answer, type):
        return answer
    schema = answer.model_json_schema(ref_template=_REF, mode="serialization")
    schemas.update(schema.pop("$defs", {}))
    schemas[answer.__name__] = schema
    return {"$ref": _REF.format(model=answer.__name__)}
