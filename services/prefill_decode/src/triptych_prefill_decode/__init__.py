"""prefill_decode service: vLLM's own OpenAI server in this process, on an engine that never encodes."""
