"""Gateway: the OpenAI-compatible front of Triptych. One process.

service        the process: its ports, start, drain and end; http_protocol, handshakes bound connections
app            the HTTP application; routes/: one module per group of paths
gateway        builds the parts below, owns their tasks, closes them
responses/     OpenAI's Responses API: responses that instances store, found again
ui/            the page at `/ui`: the gateway's view, by the caller's rights
proxy/         one request over HTTP, to prefill_decode and back: chat completions, and others without media
transfers/     items that are in another store than where they are needed
decision/      which process encodes a request's media: an encoder, or an instance with a vision tower
files/         files that callers upload once and name in many requests
encode/        encodes: orders, flights, sizes, final acks
locality/      the store whose encoders get a job
request/       requests of callers: bounds, validation, media
fetch/         media by URL: rules, downloads
routing/       the registered instances, and the choice of one for a request
access/        API keys, tenants, limits of requests
endpoints/     table of endpoints: routing and the API's description are made from it
tracing/       the span of a whole request; the last requests, for that page
open_files       budget of open files
upstream_client  the HTTP client for prefill_decode
changed_file     a file that is read again when it has changed
errors         error responses; race, metrics, settings: used by all of the above

Imports go downwards:
routes > responses > proxy | ui > transfers > decision | files > encode > locality > request | routing
| access > fetch > race > endpoints, errors, metrics, settings, tracing.
"""
