"""A discrete-event model of a deployment, fitted to traces of a real one and checked against it.

parameters   what each stage costs, and what a deployment consists of; stage_times/: sets of costs
workload     what is asked, of a real system and of the model
servers      a first-come-first-served server
requests     one request and its images
encoders, engines   the instances; engines are prefill_decodes, or monoliths for comparison
system       a deployment put together: gateways, Redis, stores, instances; the way of a request
results      figures of a run
real_runs    the same workloads on a real system
calibration  costs from its traces
predictions  predicted beside measured
gpu_estimates   costs on a GPU, computed from published figures
studies      capacity of a deployment, its rates, costs changed one at a time
tables       the studies of docs/operations/scaling.md by name; charts: its drawings
"""
