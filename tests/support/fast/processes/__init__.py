"""What runs in the forked processes.

forkserver      forks them, with everything imported; machine: whose network and clock they have
mains           what each one runs: the services' own mains, and the hosts of the two engines
encode_engine   in place of the encoder's vLLM
prefill_decode  a server around decode_engine, which stands in for prefill_decode's vLLM
kept_caches       KV caches that it keeps for others, where it only prefills
stages          a server in place of an instance that only decodes
tensors         what both compute
points          fault points: where the steps of the protocol are noticed; between two agents: mains
tally           how often which item was encoded in which job
"""
