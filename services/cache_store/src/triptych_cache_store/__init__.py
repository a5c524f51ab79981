"""cache_store: the daemon that owns a host's shared memory for encoder outputs. One process, one event loop.

In the order that a command passes them:

__main__    command line: serve, `healthcheck`, or `relay`
service     puts the daemon together, with its memory on a GPU, and ends it; `settings` says how
server      the socket: frames in, frames out, one connection per session
core/       one command at a time: what it does, which replies and pushes come of it; recovery. Pure
entries/    states of entries, free blocks, leases, eviction. Pure
persistence/  the region file and its journal
checksums/  checksums of sealed entries, taken and checked beside the work
scrape_relay  a process of its own: the store's metrics on a port, where the daemon has no network

Pure: no I/O, no clock; the region is any buffer.
"""
