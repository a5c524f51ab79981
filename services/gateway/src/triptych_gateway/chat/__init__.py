"""Forwarded requests: from the first byte to prefill_decode, and the answer back.

Chat completions and requests without media that take the same way. In the order of a request:

exchange       the HTTP exchange: admitted, read, parsed, served, answered or refused
routing_headers  routing rules in its headers
sound_request  a form with a sound: read, checked, and made anew
media_serving  a request with media: sizes waited for, forwarded with metadata, or whole where encoders fail
media_variants   its variant of the model, and another one where that has left
routing        facts for the choice of an instance
upstream_body    what is sent: text, metadata in the place of media, or the raw media, by the form of the chat
dispatch       request to send, and instances that may get it
forward        by one route after the other, until one comes to an answer; then that to the client
stages           at the instances of a route: one that does all, or one that prefills and one that decodes
stage_bodies       bodies for prefill and decode; fields that prevent both
upstream           HTTP to one instance, up to the first chunk of its answer
streaming        the answer to the client, from its first chunk on
sse                server-sent events as bytes, cut into whole ones; how many tokens they bring
token_times        when tokens pass, for the metrics
"""
