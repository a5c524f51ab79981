"""Connections to Redis, and commands on them: the one place that knows redis-py's errors.

address        where Redis is: URL, TLS, Sentinel; makes clients (`blocking`: those of vLLM's workers)
connections    connections that are given up when their server no longer takes writes
commands       runs one command within a limit, and tries it again
failures       what redis-py's errors mean
server_watch   notices that another server answers than before
rights         the commands that a user of Redis must be allowed; `rights_check` tries them
scripts        Lua scripts, from `lua/`
"""
