"""Encode jobs in the host, in the order in which a job passes the modules.

job_intake    jobs from the stream of the own store and, when idle, from other stores' streams
job_runner    one delivery of a job from the stream to its ack
job_leases    selection of this encoder's jobs; their leases in Redis; dead letters
active_job    one job's state, its requesters, and the messages sent to them
media_source  the job's media: inside the job, or from the gateway that keeps them
held_parts    reservations in the store and the encoder's pins, one of each part
encode_gate   queue of prepared items waiting for vLLM
gate_policy   order and batches of that queue
reporter      publishes EncoderCacheMetadata (sizes), EncodeCompleted and EncodeFailed
ledger        requesters that still wait for a sealed item, which decide how long its pin is kept
reply_reader  requesters' replies (`preallocations`, `acks`), which end the pins
job_telemetry spans and metrics of all that
"""
