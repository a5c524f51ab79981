"""Span of a whole request, in the terms of OpenTelemetry's conventions.

attributes     names of the attributes
request_span   the span: named, filled in as the request goes on, ended with its outcome
answer_facts   attributes from an answer: ids, usage, why it ended
timings        stages until the first chunk; history of a request's media items
recent_requests  the last requests, for the page at `/ui`
trace_trust    peers whose `traceparent` counts
"""
