"""The encoder's end of the cache_store.

store_client        The encoder's end of the store: reservations for the worker to write, and the producer's p
store_reservations  A place in the store for an item that will be encoded, and our pin of it once it is there.
transport_selector  Where this encoder puts tensors, so that those who may want them can read them.
"""
