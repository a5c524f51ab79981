"""Sending side of the fabric: the agent whose store has the entries.

transfers   orders of one item for one target, joined; what came of them
push        one entry's way to the target: its states
transport_choice  by which transport, and which one follows it where it fails. Pure
dialing     how one comes about
links       a connection to each target's agent, made when one is needed
link        such a connection, as the event loop sees it
outbox      what a connection has to send, and which chunk is next: its thread's
region_writes  with NIXL: writes that are under way
byte_turns  whose chunk is next, and the rate. Pure
"""
