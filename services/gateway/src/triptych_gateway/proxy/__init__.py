"""Forwarded requests: from the first byte to prefill_decode, and the answer back.

Chat completions and requests without media that take the same way. In the order of a request:

exchange            the HTTP exchange: admitted, read, parsed, served, answered or refused
services            parts that all requests share, grouped by owner
context             what all steps of a request share: id, caller, deadlines, variant; what is sent of it
audio_request       a form with audio: read, checked, and made anew
multimodal_request  a request with media; its steps are its methods
attempt               what it chooses anew on each try; its wait for encoders
routing               facts in a body and rules in headers for the choice of an instance
upstream_body         what is sent: text, metadata in the place of media, or the raw media
forward             by one route after the other, until one comes to an answer; then that to the client
stages                at the instances of a route: one that does all, or prefill and decode; their bodies
upstream              HTTP to one instance, up to the first chunk of its answer
streaming             the answer to the client, from its first chunk on, and when its tokens pass
sse                   server-sent events as bytes, cut into whole ones; how many tokens they bring
"""
