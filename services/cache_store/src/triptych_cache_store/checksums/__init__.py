"""Checksums of sealed tensors: 32 bits of BLAKE3.

verifier       takes and checks them while the store goes on: chooses entries, one thread reads
checksum_pass  what becomes of an entry by its checksum. Pure
checksums      computes them from the region's bytes
"""
