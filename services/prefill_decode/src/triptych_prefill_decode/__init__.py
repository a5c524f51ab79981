"""prefill_decode service: vLLM's own OpenAI server in this process, on an engine that decodes.

It encodes at most as a fallback (`--local-encode`).
"""
