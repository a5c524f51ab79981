"""Makers: each writes the model folder of one family. torch and transformers are imported when one is called.

parts        what the makers share: the language model's shape, the parts of processors
qwen_vl      Qwen2-VL, Qwen2.5-VL, Qwen3-VL: images and videos as grids, M-RoPE; Qwen3-VL with DeepStack
llava        LLaVA-1.5; LLaVA-OneVision: crops and row breaks, videos
tiled        InternVL and Idefics3: large images are cut into tiles
tagged       Gemma 3 and Mistral3: tokens of text stand around and between the embeddings
qwen2_audio  Qwen2-Audio
omni         Qwen2.5-Omni, Qwen3-Omni: images, videos and sounds
published    Qwen2.5-VL with the published settings, in its published dtype
whole        BLIP-2 and Whisper, which no encoder serves
"""
