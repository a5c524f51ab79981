"""Compute resources of a worker: cores, chosen at each step by what the neighbours do, or a GPU.

opening        the share of this worker, by its platform
compute_share  the interface that the runner wrappers know, and the share in which nothing is chosen
core_share     on the CPU: the worker's threads (OpenMP's), its place on the host's board, and the choice,
               which an encoder repeats before each layer of the vision tower
"""
