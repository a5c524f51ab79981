"""Checksums of sealed tensors.

checksum_pass  What a checksum says about a sealed entry, and what comes of it. Pure.
checksums      Checksums of tensors: 32 bits of BLAKE3, enough to notice an accident. In nobody's way.
verifier       The verifier: takes and checks the checksums of sealed entries, while the store goes on.
"""
