"""The encoder's side of the cache_store, in the order in which a job passes the modules.

store_reservations  one item's place in the store, and our pin of it once it is sealed
store_client        the session: reserve, watch, cancel, unpin
"""
