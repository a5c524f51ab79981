"""What every Triptych service shares: wire protocol, message bus, shared memory, telemetry, run time.

Layers, each importing only what stands below it:

    runtime                       settings, signals, drain
    coordination | store_session  single flight, registry, sizes in Redis; the store's client
    bus | region                  Redis Streams; shared memory and GPUs
    redis_client                  connections to Redis, commands and scripts
    telemetry                     traces, logs, metrics
    domain                        errors, hashing, transitions, pure rules
    protocol                      wire types, stream names, codec
"""
