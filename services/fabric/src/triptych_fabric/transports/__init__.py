"""Transports: how bytes of entries travel on a link.

To add one, subclass `Transport` and list it in `service`.

transport    interface, and TCP (plain or TLS); chunks to send, in fair order and within the rate
nixl         the sender writes into the receiver's region, if NIXL works here; `nixl_memory` adapts its API
"""
