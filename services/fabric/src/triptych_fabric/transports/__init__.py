"""Transports: how bytes of entries travel on a link.

To add one, subclass `Transport` and list it in `usable`.

transport    interface, and TCP (plain or TLS); chunks to send, in fair order and within the rate
nixl         the sender writes into the receiver's region; `nixl_memory` adapts NIXL's API
usable       the transports that work on this machine
"""
