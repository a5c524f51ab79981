"""prefill_decode's side of the handover, in EngineCore: which requests may run, and what they hold. Pure.

In the order in which a request meets them:

consumer       Consumer: what vLLM's scheduler asks and reports. Inbox: what other threads leave for it.
admission      Admission: what is known of one request, and its states.
request_table  RequestTable: owns the admissions; which requests are to be woken, and which have failed.
local_encode   LocalEncode: which requests an instance with a vision tower encodes itself.
overlap        OverlapPolicy: how far a request may run before all of its items are here.
item_grants    ItemGrants: space for a request's items, pins for what has space, the store's answers.
preallocator   SyncPreallocator, AsyncPreallocator: which requests may have space in the encoder cache.
item_pins      ItemPins: owns the items: watched, pinned, resident; commands to the store, load orders.
item_replies   ItemReplies: decisions and acks to encoders, orders to gateways.
deadlines      Deadlines: until when requests may wait.
ports          Interfaces to what surrounds the consumer: the store, the bus, vLLM's encoder cache.

A push of the store: `links.readable_pins`, the Inbox, item_grants, item_pins, request_table; then
`scheduler.parking_scheduler` schedules the request again.
"""
