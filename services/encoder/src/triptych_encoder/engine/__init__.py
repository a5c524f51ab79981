"""vLLM of the encoder, as its host sees it.

encode_engine    vLLM: preprocess in this process, encode in vLLM's
engine_watchdog  ends the host when the engine has work and hangs
"""
