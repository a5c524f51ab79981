"""The fabric agent: a process of its own beside the store, which moves entries to and from other stores.

How is in docs/design/fabric.md.

In the order that a transfer passes them:

service       puts the agent together: session, registration, listener, links; and ends it
settings      how it is set up
orders        reads `TransferOrder`s, and tells gateways what came of them
source/       has entries: joins orders, watches, offers, sends
wire/         between two agents: authentication, frames, the thread of a connection
target/       takes entries: listens, reserves, receives, checks, seals
local_store   the session with its own store, and the mapping of the region
metrics       what is counted
load          what its record tells operators: the store's room, bytes and failures of each link

An event loop decides everything. Each connection has a thread that carries bytes and decides nothing.
"""
