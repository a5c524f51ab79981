"""The encoder's vLLM engine, as its host uses it.

encode_engine    vLLM: preprocess in this process, encode in vLLM's
"""
