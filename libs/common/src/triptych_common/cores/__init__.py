"""Cores and GPUs of one host, and the engines that share them.

Pure but for `usable`, `board` and `mps`.

usable    which cores this process may use: affinity, and the quota of its cgroup
plan      which of them each engine of a host owns
sharing   on which cores an engine computes now, from what the others do
board     a file in shared memory in which each engine's worker writes what it does, and reads the others
gpu_plan  which GPU each engine computes on, its part of the memory, its limits under MPS
mps       NVIDIA's Multi-Process Service: whether its control daemon is there, and a process's limits
"""
