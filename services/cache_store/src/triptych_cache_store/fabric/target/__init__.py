"""Receiving side of the fabric: the agent whose store takes the entries.

listener     takes connections of other agents, within bounds
link_calls   those that come through Redis
peer         one of them, as the event loop sees it
reception    one entry's way into the store: its states
inbox        where bytes of accepted entries go: the connection's thread's
written_chunks  with NIXL: what the source has written, and may still write
byte_budget  the bound on bytes that are reserved and not sealed yet. Pure
"""
