"""Records of items between vLLM's renderers (`protocol.item_record` has their form).

packing     tensors and token lists to `PackedArray`s and back
item_fields which fields of an item the language model reads, and which its encoder alone does
recording   encoder: what the renderer made of an item, as a record
replaying   prefill_decode: the renderer is given records in place of media; items that URLs name
video_steps videos as steps of their grid, of which some may be encoded by themselves
positions   whether the model can place an item of these fields among the prompt's tokens
"""
