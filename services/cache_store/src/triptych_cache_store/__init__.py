"""cache_store: the daemon that owns a host's shared memory for encoder outputs.

entry_table  states of entries (pure)            block_pool  free ranges of blocks (pure)
leases       what each session holds (pure)      eviction    who goes first (pure)
core         command in, replies and pushes out (pure: no I/O, no clock)
region_file  makes and prefaults the region      server      the socket around the core
"""
