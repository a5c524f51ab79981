"""Between two agents.

frames      what travels: headers and bodies, checked before anything is allocated. Pure
keys        the shared key, proofs made with it, TLS contexts
channel     bytes each way, with bounded waits: by `tcp_channel`, plain or TLS, or by `redis_channel`
redis_entries  what the latter writes to its streams. Pure
redis_links    how such a channel comes about
handshake   who is there, before anything else is said
connection  the thread of one connection: frames in, frames and chunks out
nixl_memory  the region as NIXL sees it, for one link
checksum    of an entry's bytes
"""
