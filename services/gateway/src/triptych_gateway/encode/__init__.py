"""Ordering of encodes: items, jobs, single flight.

encode_job     What a job says: made from the requests that wait for its item. Pure.
encode_orders  Encode orders: what requests here want of encoders, and what they are told of it.
encode_wait    How long a request waits for encoders: for its sizes, and later for the tensors that it was sen
final_acks     The gateway's own last word about an item, where prefill_decode will not say one.
item_queue     ItemQueue: the items that a step shall be taken for, each listed once; what no encoder knows go
item_table     Item table: what the gateway knows about each media item that some request waits for. Pure.
job_queue      The jobs of each namespace, seen as a queue with bounds.
media_cache    Media bytes, kept while a request needs them, reachable by encoders under an unguessable path.
media_wait     MediaWait: one request's wait for its media items.
single_flight  Flights as this gateway sees them: Redis is told who waits here for which item, and who no long
sizes          Placeholder sizes of items: what prefill_decode must know before the tensor exists.
"""
