"""Plan of one system's processes, and of this machine's resources for them. Nothing is started here.

layout             files of the running system
joining            makes this machine one of several hosts: its name and address, its key, its Redis
shared_secrets     files that the hosts share: the key of the fabric, the URL of Redis
resolved_options   the user's options, settled for this machine; plan of one host of several (pure)
machine            model folders, free ports, GPUs, room for the region, redis-server: makes resolved options
preflight          checks of what would fail later: the model, its media, Redis, the size of the region
engines            encoders and engines of language models: arguments, environment, shares of GPUs (pure)
topology           every process, its environment, order and readiness condition (pure)
"""
