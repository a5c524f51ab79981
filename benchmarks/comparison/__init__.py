"""`compare`: Triptych beside one vLLM engine and beside vLLM's own encoder disaggregation, in one run.

model_shapes   the models' shapes, by scale (data)
model_folder   writes such a model, with random weights
arms           what is compared: names, and how each is set up (data)
systems        starts an arm, and ends it
cores          which core does what
serial_proxy   encode first, then prefill: the proxy of the serial arm
processes      memory and CPU seconds of an arm's processes
workloads      what is asked: rounds of requests, from a seed (pure)
rounds         runs a round on a system
measuring      all arms take turns, repeat after repeat
exactness      whether all arms gave the same tokens (pure)
stages         how long encode and prefill take, and what overlap can hide (pure)
bars           what is to be shown, written down before the run, and whether it was (data, pure)
report         the tables (pure)
"""
