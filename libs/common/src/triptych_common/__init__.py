"""What every Triptych service shares: wire protocol, message bus, shared memory, telemetry, run time.

Layers, each importing only what stands below it:

    runtime                 settings base, signals, serve and drain
    bus | region            Redis Streams; shared memory and the store's client
    telemetry               traces, logs, metrics
    domain                  errors, hashing, pure rules
    protocol                wire types, stream names, codec
"""
