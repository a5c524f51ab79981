"""What vLLM's scheduler calls, in EngineCore.

parking_scheduler      ParkingScheduler, ParkingAsyncScheduler: a request that waits costs no engine step.
                       LoraSlots: stalled requests keep their adapters.
decode_scheduler       DecodeScheduler, DecodeAsyncScheduler: of engines that take prompts as KV caches.
kv_owner               An engine that prefills says when the lease of a KV cache ends.
kv_refusals            KvRefusals: which of its requests the KV cache does not cover, and end at once.
giving_way             GivingWay: what partial requests hold goes back when others need it.
prompt_steps           PromptSteps: while requests decode, a step takes a chunk of the prompts.
prompt_turns           PromptTurns: whose prompt comes next, where API keys share the engine.
prompt_chunks          PromptChunks: how large, so that decoding keeps its share of the time.
clipping               Where prompts may be computed in parts of any length.
partial_requests       PartialRequests: those that began without all of their items, and how many may.
encoder_cache_manager  vLLM's encoder cache, on prefill_decode and on the encoder.
failed_loads           What is undone when a worker could not read a tensor.
"""
