"""Transfers of items between hosts' stores, as docs/design/fabric.md describes.

All of it is idle, without calls to Redis, while one store is registered.

fabric_view      registered stores and their agents
item_sources     the stores that an item can be taken from, the best first; pure
place_finder     where items are, by encoders' word and the directory
transfer_table   each transfer's state (drawn there); pure
transfer_order   the order of one transfer, made from the requests that wait for it; pure
next_step        next step of a waiting transfer; pure
transfer_limits  time limits and attempts
link_rates       predicted seconds of each link, and links to avoid; pure
directory_notes  additions to the directory and removals, written in the background
transfer_trace   a transfer as a span of the requests that wait for it
transfer_orders  the owner: orders, results, timers, and what requests ask for
"""
