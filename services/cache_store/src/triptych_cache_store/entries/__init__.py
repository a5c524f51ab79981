"""Entries and blocks: what each block is used for, and what may be evicted. Pure.

space            the steps that change the tables below together; evicts when it must; blocks of each tenant
entry_table      states of entries (the machine `EntryState`)
block_pool       free ranges of blocks
eviction         which evictable entry is worth least
limits           how full the region may get, also by tenant
entry_journal    the journal that keeps nothing; `persistence.journal` keeps one in the region
leases           what each client holds: reservations, pins, watches
"""
