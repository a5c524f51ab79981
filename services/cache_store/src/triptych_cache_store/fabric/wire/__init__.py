"""Between two agents.

frames      what travels: headers and bodies, checked before anything is allocated. Pure
keys        the shared key, proofs made with it, TLS contexts
channel     a socket, plain or TLS, with bounded waits
handshake   who is there, before anything else is said
connection  the thread of one connection: frames in, frames and chunks out
checksum    of an entry's bytes
"""
