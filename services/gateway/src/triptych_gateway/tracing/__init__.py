"""The span of a whole request: what is known of it, in the terms of OpenTelemetry's conventions.

attributes     names of the attributes
request_span   the span: named, filled in as the request goes on, ended with its outcome
parameters     what of a body is said about it: numbers, never text
answer_facts   what of an answer is said about it: ids, usage, why it ended
stages         where the time until the first chunk went
item_timing    what became of a request's media items, and when
recent_requests  the last requests, for the page at `/ui`
trace_trust    whose `traceparent` counts
"""
