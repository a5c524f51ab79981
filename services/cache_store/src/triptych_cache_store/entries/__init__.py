"""Entries and blocks: who owns which, what may go.

block_pool       Block pool: which blocks of the region are free. Pure; hands out contiguous ranges only.
entry_table      Entry table: who owns each block of the region, and when it may be used again.
eviction         Eviction policy: what of the unpinned sealed entries is worth least. Pure.
eviction_window  Room: which neighbours must go so that a large enough range becomes free. Pure.
leases           Leases: what each client holds. Everything of a client ends with its process.
limits           Limits: how full the region may get, and for whom. Pure numbers, no state.
space            Space: the steps that change table, pool, policy and journal together. Evicts when it must. N
tenants          Tenants: how many blocks each holds, and its own order of eviction. Pure.
"""
