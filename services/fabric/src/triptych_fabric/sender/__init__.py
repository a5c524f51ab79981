"""Sending side of the fabric: the agent whose store has the entries.

transfers   orders of one item for one receiver, joined, and their results
push        one entry's way to the receiver: its states
links       a connection to each receiver's agent, made when one is needed, and the choice of its transport
link        such a connection: offers and answers, in the event loop and in its thread
"""
