"""Faults between processes.

tcp_proxy   between a client and a server: cuts, delays, swallows, redirects
slowing     processes that get a small part of the time
"""
