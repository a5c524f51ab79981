"""vLLM of the encoder, as its host sees it.

encode_engine    vLLM: preprocess in this process, encode in vLLM's
video_pieces     a prepared video as several items of vLLM, each some steps of its grid
"""
