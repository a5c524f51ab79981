"""Code that every Triptych service shares: wire protocol, message bus, shared memory, telemetry, run time.

Layers, each importing only what stands below it:

    runtime                       settings, signals, drain
    coordination | store_session  single flight, registry, sizes in Redis; the store's client
    bus | region | cores          Redis Streams; shared memory and GPUs; cores of one host
    redis_client                  connections to Redis, commands and scripts
    telemetry                     traces, logs, metrics
    domain                        errors, hashing, transitions, pure rules
    protocol                      wire types, stream names, codec

An *item* is one image, video or audio clip of a request; its tensor (the encoder's output) is one *entry* in
the store. An encoder *reserves* blocks, writes, and *seals*; prefill_decode *pins* a sealed entry, or
*watches* one that is being written. The *flight* of an item records in Redis which encoder works on it and
which *requesters* wait. All terms: docs/reference/glossary.md.

To add a transport: its name in `protocol.messages.Transport` and `protocol.store`; the choice in
`domain.transports`; a writer and a reader by `region.transport`; in the connector `worker.transports` opens
them, `readable` lists what an engine can read, `host.slab_watch` what an instance announces.
"""

from importlib.metadata import version


def release() -> str:
    """Return the version of Triptych that is installed; all members have the same."""
    return version("triptych-common")
