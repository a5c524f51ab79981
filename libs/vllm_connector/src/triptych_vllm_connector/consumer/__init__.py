"""prefill_decode's side of the handover: bookkeeping of requests and items. Pure, in EngineCore.

admission      Admission records: what PD's engine knows of each request that needs remote items. Pure.
arrivals       Arrivals: what the store says about items, and what it means for the requests that wait for the
consumer       PD's side of the handover, inside EngineCore: decide, pin, wait, wake, release.
deadlines      Until when requests may wait in prefill_decode's engine: a gateway that hangs ends nothing. Pur
item_grants    Grants: space in the encoder cache for the items of requests, and pins for what has space.
item_pins      ItemPins: the item table with the store at its one end and vLLM's encoder cache at the other.
item_replies   Conversation about each (request, item) with the encoder that makes it. Pure.
item_table     Item table: what PD's engine holds of each media item, and who needs it. Pure bookkeeping.
local_encode   Which requests an instance with a vision tower encodes itself. Pure.
preallocator   Preallocator: which requests may have space in the encoder cache, before their tensors exist. P
request_table  Request table: the admission of each living request, who is to be woken, and who has failed.
speech         What PD's engine says about its requests' items: to their encoders, and to the gateways.
waits          Waits: how long requests wait, and may wait: spans and deadlines.
"""
