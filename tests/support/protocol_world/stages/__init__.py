"""Requests in two stages, in the model of the protocol: one instance prefills, another takes its KV cache.

prompts   the tokens of a request's body, as an engine renders it
kv_pages  what lies in the KV blocks of an engine that prefills, and which of it is kept for whom
prefill   an instance that prefills: the real `Consumer`, and a KV cache that others read
decode    an instance that decodes: the real refusals and leases; it has no session with the store
gateway   the real `Forwarder` with all behind it, and its connections to instances
world     the steps of all of them, their faults, and what must hold
prints    their part of a fingerprint
"""
