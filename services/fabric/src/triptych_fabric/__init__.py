"""The fabric agent: a process beside the store, which moves entries to and from other stores.

How is in docs/design/fabric.md. In the order that a transfer passes them:

__main__      command line: serve, or `healthcheck`
service       puts the agent together: session, registration, listener, links; and ends it. `settings` say how
orders        reads `TransferOrder`s, and publishes their results to gateways
sender/       the agent whose store has the entries: joins orders, watches, offers, sends
transports/   how bytes travel: TCP (plain or TLS), NIXL
wire/         a connection of two agents: authentication, frames, its thread
receiver/     the agent whose store takes the entries: listens, reserves, receives, checks, seals
local_store   the session with the agent's own store, and the mapping of the region
metrics       counters of the agent
load          its registry record for operators: the store's room, bytes and failures of each link

An event loop decides everything. Each connection has a thread that carries bytes and decides nothing.
"""
