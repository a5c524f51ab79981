"""Cores of one host, and the engines that share them. Pure but for `usable` and `board`.

usable    which cores this process may use: affinity, and the quota of its cgroup
plan      which of them each engine of a host owns
sharing   on which cores an engine computes now, from what the others do
board     a file in shared memory in which each engine's worker writes what it does, and reads the others
"""
