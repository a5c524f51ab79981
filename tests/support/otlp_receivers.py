"""Receivers of OTLP on this machine: what a collector is to an exporter."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Requests = list[ExportTraceServiceRequest]


@contextmanager
def http_receiver() -> Iterator[tuple[str, Requests]]:
    received: Requests = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", received
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_receiver() -> Iterator[tuple[str, Requests]]:
    grpc = pytest.importorskip("grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service

    received: Requests = []

    class Receiver(service.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            received.append(request)
            return ExportTraceServiceResponse()

    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        service.add_TraceServiceServicer_to_server(Receiver(), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}", received
        finally:
            server.stop(None).wait()


def all_spans(requests: Requests) -> list[Span]:
    """In the order in which they came."""
    return [
        span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def trace_of(requests: Requests, request_id: str) -> dict[str, list[Span]]:
    """The spans of each trace that has this request, by the instance that sent them: it should be one."""
    by_instance: dict[str, list[Span]] = {}
    for request in list(requests):
        for resource in request.resource_spans:
            instance = _text(resource.resource.attributes, "service.instance.id")
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            by_instance[instance] = by_instance.get(instance, []) + spans
    trace_ids = {
        span.trace_id
        for spans in by_instance.values()
        for span in spans
        if _text(span.attributes, "triptych.request_id") == request_id
    }
    found = {
        instance: [span for span in spans if span.trace_id in trace_ids]
        for instance, spans in by_instance.items()
    }
    return {instance: spans for instance, spans in found.items() if spans}


def _text(attributes: Iterable[KeyValue], key: str) -> str:
    """Empty: there is none."""
    return next((each.value.string_value for each in attributes if each.key == key), "")


def spans_of(requests: Requests) -> dict[str, Span]:
    """By name."""
    return {span.name: span for span in all_spans(requests)}


RECEIVERS = {"http/protobuf": http_receiver, "grpc": grpc_receiver}
