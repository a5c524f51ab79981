"""Receiving side of the fabric: the agent whose store takes the entries.

listener     accepts connections of other agents, within bounds
peer         such a connection: offers and answers, in the event loop and in its thread
reception    one entry's way into the store: its states, and the budget of bytes under way
"""
