"""One chat completion, from its first byte to its last.

choice         Which prefill_decode gets one request, and who is next when that one does not take it.
exchange       One chat completion, from its first byte to its last.
forward        A prepared request goes to prefill_decode, its answer to the client.
race           Run work under guards: the first guard that raises ends the work.
sse            Server-sent events as bytes: cut into whole events, never rewritten.
streaming      Relay of an answer to the client, from the moment its first chunk is there.
upstream       HTTP to prefill_decode, up to the first chunk of its answer.
upstream_body  The request for prefill_decode: metadata instead of media, and the items it will wait for.
"""
