"""In the worker of an engine that decodes: what it reads of others' KV caches.

leases  until when a KV cache of another engine may be read
reader  what was read of one counts only within its lease
reads   which engines have such a reader
"""
