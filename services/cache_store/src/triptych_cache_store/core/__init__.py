"""The store's logic. Pure.

store_core  a command comes in, replies and pushes come out
sessions    hello, resume, disconnect, and the end of clients that do not come back
commands    what each command does, and what the store reports: entries, statistics
state       the spaces of all memories, leases and counters; steps over several of them
recovery    fills the state from the journal of the store before
metrics     the store's figures as Prometheus' text
latencies   a histogram without a clock or a registry
"""
