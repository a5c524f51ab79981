"""From a job's media to an item that the vision tower takes, in the host. In the order of a job.

preprocessor     all of it, bounded in pixels and in time
bounded_threads  blocking work in threads, bounded together in cost and each in time
cost_budget      a bound on the cost of what runs, or is kept, at once
media_decoders   the decoder of each modality, and what decoding costs
decoding         from an image's bytes to its pixels: exactly the image that the gateway saw, or nothing
video_decoding   from a video's bytes to its sampled frames: vLLM's loaders, bounded
audio_decoding   from an audio file's bytes to its samples: vLLM's reader, bounded
item_schema      checks the form of what the model's processor makes; learned at the start, knows no model
references       media of our own, from which it is learned
"""
