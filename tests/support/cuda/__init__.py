"""CUDA in tests.

fake_cuda      a GPU in host memory that keeps CUDA's rules
cuda_samples   what tests on it share
gpu            why the tests on a real GPU cannot run here
gpu_producer   a process that makes one tensor on a real GPU and hands it over
stub           both workers around a stub of vLLM's model runner, on a real GPU or the fake one
"""
