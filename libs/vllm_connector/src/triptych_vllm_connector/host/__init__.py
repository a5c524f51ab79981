"""In a service's own process, before and beside its engine. In the order of a start.

engine_options          vLLM's command-line options for each role, and which of them are refused
kv_transfer             options, environment and announcement of instances that hand KV caches over
namespace               the namespace digest: what must be equal for two engines to share tensors
model_snapshot          which files a model is made of, for the digest
model_facts             what an engine announces of its model: media that it takes, tokens that stand for them
image_reader            local encode: the image formats that vLLM's own reader may open
video_reader            from a video's bytes to its sampled frames, within bounds
audio_reader            the audio formats that it may open, none of which it guesses
engine_watchdog         tells an engine that hangs from one that is slow, and ends what waits for it
platform                what this machine offers: a GPU, the store's region
budget                  rows of encoder output: vLLM's encoder cache, and the preallocator's budget
slab_watch              which transports the instance offers; announces them again when the store restarts
"""
