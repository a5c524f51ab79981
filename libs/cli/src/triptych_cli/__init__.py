"""The commands behind `./triptych`: the whole system on one machine, and tools to inspect it.

bootstrap     makes the Python environment (standard library only; the launcher `./triptych` runs it)
__main__      what the launcher runs then
app           names, options and help of the commands
roles         how many engines of each role a system has
options       the options that `demo`, `up` and the daemon share
settings      what is read from the environment
commands/     what each command does
system/       which processes one system is, and what this machine offers them: nothing is started
supervisor/   child processes: start, readiness, restart, stop; the daemon that `up` leaves behind
console       output on the terminal

Imports go down this list, from `app`; `roles`, `settings` and `console` are for all.
"""
