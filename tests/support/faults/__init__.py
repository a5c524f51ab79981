"""Faults between processes.

tcp_proxy    between a client and a server: cuts, delays, swallows, redirects
distance     Redis far away: every byte comes later; round trips, what they are for, and their number
resets       connections that their peer resets
redis_cluster  three masters and their replicas: failover
redis_pair   a primary, its replica and a sentinel: failover
slowing      processes that get a small part of the time
"""
