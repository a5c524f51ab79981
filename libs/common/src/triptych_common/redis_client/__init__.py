"""Connections to Redis and commands on them: the only place that knows redis-py's errors.

address        where Redis is: URL, TLS, Sentinel; makes clients (`blocking`: those of threads)
commands       runs one command within a time limit, with retries
server_watch   detects that Redis was restarted, failed over or emptied
rights         the permissions (ACL) that a user of Redis needs, and their check
scripts        Lua scripts, from `lua/`
"""
