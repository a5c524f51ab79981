"""The side that takes entries.

listener     accepts connections of other agents, within bounds
peer         one of them, as the event loop sees it
reception    one entry's way into the store: its states
inbox        where bytes of accepted entries go: the connection's thread's
byte_budget  the bound on bytes that are reserved and not sealed yet. Pure
"""
