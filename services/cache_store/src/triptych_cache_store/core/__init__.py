"""The store's logic. Pure.

store_core  a command comes in, replies and pushes come out
commands    what each command does, and what the store reports: entries, statistics
state       the spaces of all memories, leases and counters; steps over several of them
recovery    fills the state from the journal of the store before
metrics     the store's figures as Prometheus' text
"""
