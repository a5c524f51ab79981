"""The vLLM engine of the encoder.

encode_engine    The vLLM engine of the encoder: preprocess in this process, encode in vLLM's.
encoding         What encodes, as a job sees it: so that jobs can be tested, and imported, without vLLM.
engine_watchdog  How long the engine may say nothing while it has work: one that hangs is as good as dead.
"""
