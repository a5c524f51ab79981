"""cache_store: the daemon that owns a host's shared memory for encoder outputs.

    entry_table  states of entries              block_pool  free ranges of blocks
    leases       what each client holds         eviction    who goes first
    journal      all that, in the region        adoption    and back, after a restart
    space        entries and blocks together    state       all of it, and its steps
    commands     what each command does         sessions    hello, resume, disconnect
    core         command in, replies and pushes out

    region_file  makes, adopts and prefaults the region   server   the socket around the core
    service      the daemon put together                  testing  a daemon as a child process

All above the gap are pure: no I/O, no clock; the region is any buffer.
"""
