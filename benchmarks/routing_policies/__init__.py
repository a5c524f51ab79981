"""Several ways to choose between two prefill_decodes, on conversations about images that they share.

arms           the ways: files of routing profiles beside this one, `*.yaml`
conversations  what is asked, turn by turn
gateways       a gateway for each arm, before the same engines
prefix_caches  what vLLM counts of its prefix caches
measuring      rounds: each arm in turn, on conversations of its own
results        the figures, and the bars
"""
