"""Encode jobs, in the host. In the order in which a job passes them.

encoder_peers who else takes jobs of the namespace, where, and how fast; encoders share them
encode_speed  how fast this one is, for the others
job_intake    jobs from the stream of its own store and, when idle, from other stores' streams
job_runner    one delivery of a job from the stream to its ack
job_leases    which jobs this encoder does at all; their leases in Redis; dead letters
active_job    one job's state, its requesters, and what was sent to them
media_source  its media: inside the job, or from the gateway that keeps them
description   how a preprocessed item is described to the store, to requesters, and to the worker
held_parts    its reservations in the store and our pins, one of each part
encode_gate   prepared items wait here until vLLM shall have them
gate_policy   which of them go next, and how many at a time
reporter      publishes EncoderCacheMetadata (sizes), EncodeCompleted and EncodeFailed
ledger        which requesters still wait for a sealed item, so how long the producer's pin is kept
reply_reader  their replies (`preallocations`, `acks`), which end the pins
job_telemetry the spans and metrics of all that
"""
