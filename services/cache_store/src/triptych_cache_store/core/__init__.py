"""The store's logic. Pure.

store_core  a command comes in, replies and pushes come out
sessions    hello, resume, disconnect, and the end of clients that do not come back
commands    what each command does
state       the spaces of all memories, leases and counters; steps over several of them
recovery    fills the state from the journal of the store before
views       what it reports of its state: entries, statistics; `metrics`: Prometheus' text
latencies   a histogram without a clock or a registry
"""
