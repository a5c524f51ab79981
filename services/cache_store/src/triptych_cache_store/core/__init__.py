"""The store's logic. Pure.

store_core  a command comes in, replies and pushes come out
sessions    hello, resume, disconnect, and the end of clients that do not come back
commands    what each command does
state       all state of the store, and the steps that keep its parts in agreement
views       what it reports of its state: entries, statistics
latencies   a histogram without a clock or a registry
"""
