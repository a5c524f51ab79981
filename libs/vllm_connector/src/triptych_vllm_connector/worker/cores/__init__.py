"""On which cores a worker on the CPU computes, chosen again and again from what its neighbours do.

core_share   the worker's threads, its place on the host's board, and the choice
layers       encoder: the choice again before each layer of the vision tower
core_range   fewest and most cores of a step, for its span
openmp       the OpenMP runtime of this process: how many threads a team has, and which they are
"""
