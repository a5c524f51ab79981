"""Connection between two agents: handshake, frames, channel.

channel     bytes each way on a socket, plain or TLS, with bounded waits
keys        the shared key, proofs made with it, TLS contexts
handshake   mutual proof of identity, before any frame
frames      every frame: headers and bodies, checked before anything is allocated. Pure
connection  the thread of one connection: frames in, frames and chunks out
"""
