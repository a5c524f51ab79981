"""For the tests on a GPU; neither module needs Triptych to be installed.

gpu            why they cannot run here
gpu_producer   a process that makes one tensor on the GPU and hands it over
"""
