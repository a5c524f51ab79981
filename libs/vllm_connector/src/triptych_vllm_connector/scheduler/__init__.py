"""Hooks of vLLM's scheduler, in EngineCore.

parking_scheduler      ParkingScheduler, ParkingAsyncScheduler: a request that waits costs no engine step.
                       LoraSlots: stalled requests keep their adapters.
decode_scheduler       DecodeScheduler, DecodeAsyncScheduler for engines that take prompts as KV caches.
kv_refusals            KvRefusals: ends requests that their KV cache does not cover.
partial_preemption     PartialPreemption: partial requests give back what others need.
prefill_budget         PrefillBudget: while requests decode, a step takes a chunk of the prompts.
prefill_fairness       PrefillFairness: order of prompts, where API keys share the engine.
prefill_chunking       PrefillChunking: size of a chunk, so that decoding keeps its share of the time.
encoder_cache_manager  vLLM's encoder cache, on prefill_decode and on the encoder.
failed_loads           Fails the requests of a tensor that a worker could not read.
"""
