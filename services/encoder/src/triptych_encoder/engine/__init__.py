"""vLLM of the encoder, as its host sees it.

encoding         the protocol of an engine that encodes, its errors and limits: jobs need no vLLM
encode_engine    vLLM: preprocess in this process, encode in vLLM's
engine_watchdog  ends the host when the engine has work and hangs
"""
