"""`serve`: any OpenAI endpoint under load, measured by vLLM's own `bench serve`, plus stages from our traces.

load_points    how hard: open loop, closed loop, replay (pure)
replay         a recorded or written trace of arrivals, as vLLM's requests
vllm_bench     one load point, run by vLLM's code
stage_times    how long each stage took meanwhile, from trace files
serve_report   the tables (pure)
plots          latency over load, distribution of gaps, timeline, as SVG (pure)
"""
