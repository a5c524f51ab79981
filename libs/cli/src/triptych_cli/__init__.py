"""The commands behind `./triptych`: the whole system on one machine, and tools to look into it.

bootstrap     makes the Python environment (standard library only, run by the launcher)
topology      which services, with which environment, in which order (pure)
supervisor/   child processes: start, readiness, restart, stop
commands/     one module per command
"""
