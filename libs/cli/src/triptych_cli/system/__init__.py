"""Which processes one system is, and what this machine offers them. Nothing is started here.

layout             where the running system keeps its files
resolved_options   the user's options, settled for this machine
machine            model folders, free ports, GPUs, room for the region, redis-server: makes resolved options
engines            encoders and engines of language models: arguments, environment, shares of GPUs (pure)
topology           every process, its environment, order and readiness condition (pure)
"""
