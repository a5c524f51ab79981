"""Checksums of sealed tensors: 32 bits of BLAKE3.

verifier       takes and checks them while the store goes on: chooses entries, one thread reads
"""
