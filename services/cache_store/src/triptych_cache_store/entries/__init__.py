"""Entries and blocks: what each block is used for, and what may be evicted. Pure.

space            the steps that change the tables below together; evicts when it must; blocks of each tenant
entry_table      states of entries (the machine `EntryState`)
block_pool       free ranges of blocks
leases           what each client holds: reservations, pins, watches
"""
