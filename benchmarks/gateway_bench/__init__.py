"""Parts of `gateway_cost.py` and `gateway_streams.py`.

upstream      a prefill_decode without a model: answers each request with a fixed number of events
proxy         a minimal proxy on aiohttp: what any proxy in Python costs
arms          the processes that are compared, each pinned to a core, and the CPU time that they use
load          clients that cost little, and the times at which their answers came
rounds        which arm is asked when, and the figures of all rounds
redis_counts  commands and round trips of the gateway to Redis, per kind of request
report        the figures as tables, and the bars
streams       many streams at once: each token's way in time, their order, and what they take of memory
"""
