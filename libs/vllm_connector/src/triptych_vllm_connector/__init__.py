"""What Triptych puts inside vLLM: an encoder-cache connector, a scheduler that parks, a preallocating
encoder cache manager, and model runner wrappers. Everything is loaded through vLLM's own options
(`engine_options` builds them); nothing in vLLM is replaced but the seams listed in `plugin`.
"""
