"""Transfers of items between hosts' stores, as docs/design/fabric.md describes.

All of it is idle, without calls to Redis, while one store is registered.

fabric_view      registered stores and their agents
place_finder     where items are, by encoders' word and the directory
transfer_table   each transfer's state (drawn there); pure
next_step        next step of a waiting transfer; pure
transfer_trace   a transfer as a span of the requests that wait for it
transfer_orders  the owner: orders, results, timers, and what requests ask for
"""
