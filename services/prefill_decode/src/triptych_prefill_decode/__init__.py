"""prefill_decode service: vLLM's own OpenAI server, hosted in this process, on an engine that never encodes."""
