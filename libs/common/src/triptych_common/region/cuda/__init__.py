"""GPUs: the region registered for fast copies, and the store's own device memory.

driver      what is needed of CUDA, as one interface; nothing else here knows NVIDIA's bindings
loading     makes the driver, where bindings and a GPU are there
runtime     the interface over `cuda.bindings.runtime`, loaded on demand
slab        device memory: the store's end, and a client's mapping of it
release     waits for events, off the engine's thread
transports  the workers' ends (imports torch)
"""
