"""Gateway: the OpenAI-compatible front of Triptych. One process.

service        the process: starts, drains within a bound, ends
listeners      what each of its ports serves, and how; http_protocol bounds their connections
app            the HTTP application; routes/: one module per group of paths
gateway        builds the parts below, owns their tasks, closes them; gateway_parts: those that settings say
responses/     OpenAI's Responses API: responses that instances store, found again
ui/            the page at `/ui`: what the gateway sees, and whom it is shown
chat/          one request over HTTP, to prefill_decode and back: chat completions, and others without media
transfers/     items that are in another store than where they are needed
decision/      who encodes a request's media: encoders, or an instance with a vision tower
files/         files that callers upload once and name in many requests
encode/        what requests need of encoders: orders, flights, sizes, final acks
locality/      to which store's encoders a job goes
request/       what a caller sent: bounds, validation, media
fetch/         media that are named by URL: which may be fetched, and how
routing/       which instances there are, and which of them gets a request
access/        API keys, tenants, bounds on what is served at once
endpoints/     what is served, in one table: routing and the API's description are made from it
tracing/       the span of a whole request; the last requests, for that page
memory           where the C library takes large blocks from
open_files       how many files the process may have open
upstream_client  the HTTP client for prefill_decode
changed_file     a file that is read again when it has changed
errors         error responses; race, metrics, settings: likewise for all of the above

Imports go downwards:
routes > responses > chat | ui > transfers > decision | files > encode > locality > request | routing
| access > fetch > race > endpoints, errors, metrics, settings, tracing.
"""
