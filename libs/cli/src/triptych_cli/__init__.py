"""The commands behind `./triptych`: the whole system on one machine, and tools to look into it.

bootstrap     makes the Python environment (standard library only, run by the launcher)
app           names, options and help of the commands
commands/     what each command does
launch        looks at the machine: model, ports, GPUs, room for the region
layout, topology, engines   which processes, where, with which environment, in which order (pure)
supervisor/   child processes: start, readiness, restart, stop; the daemon that `up` leaves behind
console, picture            what people see
"""
