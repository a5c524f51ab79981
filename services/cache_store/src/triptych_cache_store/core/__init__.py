"""The store's logic. Pure.

commands    What each command does. Pure; a command that is refused has changed nothing, but may have evicted.
latencies   A histogram without a clock or a registry, so that the pure parts can count into it.
sessions    Sessions come and go: hello, resume, disconnect, and the end of clients that do not come back. Pur
state       All state of the store, and the steps that keep its parts in agreement. Pure.
store_core  The store's logic: a command comes in, replies and pushes come out. No I/O, no clock, never awaits
views       What the store tells about its state: entry states, statistics. Changes nothing.
"""
