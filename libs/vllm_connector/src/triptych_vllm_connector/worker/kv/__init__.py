"""In the workers of engines that hand KV caches over, or read them.

opening  before vLLM makes its KV connector: what of NIXL is replaced
reader   decode: what was read of a KV cache counts only within its lease
leases   until when that is
"""
