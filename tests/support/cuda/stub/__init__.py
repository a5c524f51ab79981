"""Both workers as they are, around a stub of vLLM's model runner V2, with a real store between them.

devices   the GPU as the stub uses it: torch's, or host memory with `fake_cuda`'s rules
roles     the stub's two sides: the encoder's worker and prefill_decode's
handles   starts a role in a process of its own, or in this one, and calls it
system    the store, both roles, and the hosts' part: places, pins, one item from side to side
machines  what a system is made of: a real GPU, or a fake one

The stub keeps what of the runner matters to a transport: all kernels on a stream of its own, two steps in
flight, a gather into a static buffer that a CUDA graph reads, results fetched by another stream, and items
that are dropped while the GPU has yet to read them.
"""
