"""KV transfer in the workers of engines that hand KV caches over, or read them.

opening  prepares NIXL before vLLM makes its KV connector
reader   decode: a read of a KV cache counts only within its lease
leases   end of each lease
"""
