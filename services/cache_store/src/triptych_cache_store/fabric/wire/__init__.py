"""Connection between two agents: handshake, frames, channels.

frames      every frame: headers and bodies, checked before anything is allocated. Pure
keys        the shared key, proofs made with it, TLS contexts
channel     bytes each way, with bounded waits: `tcp_channel` (plain or TLS) or `redis_channel`
redis_entries  entries of a link's streams in Redis. Pure
redis_links    opens channels through Redis
handshake   mutual proof of identity, before any frame
connection  the thread of one connection: frames in, frames and chunks out
nixl_memory  the region registered with NIXL, for one link
checksum    checksum of an entry's bytes
"""
