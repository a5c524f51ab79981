"""Host code in a service's own process, before and beside its engine, in the order of a start.

process_start           before vLLM is imported: versions are refused, its processes are spawned
engine_options          vLLM's command-line options for each role, and which of them are refused
kv_transfer             options, environment and announcement of instances that hand KV caches over
namespace               the namespace digest: what must be equal for two engines to share tensors
model_facts             facts of a model for the registry: media that it takes, their placeholder tokens
image_reader            local encode: image formats that vLLM's own reader may open
video_reader            from a video's bytes to its sampled frames, within bounds
audio_reader            audio formats that vLLM's reader may open, none of which it guesses
engine_fork             EngineCore on the CPU, forked instead of spawned
engine_watchdog         detects an engine that hangs, and ends what waits for it
platform                this machine's GPU and store region
slab_watch              transports the instance offers, announced again when the store restarts
"""
