"""Parts of `soak_system.py`.

target          a system under load as the soak sees it: its faults, its health, what is left of requests
fast, real      two targets: engines without vLLM, and vLLM on the CPU
hosts           a third one: as fast, on three hosts, whose network has faults too
fault_injector  one fault after the other, each when the system is healthy again
report          runs load and faults; the report and its judgement
"""
