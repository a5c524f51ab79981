"""Child processes of one system: ordered start, readiness, restart, stop.

launch       options -> a supervisor that can be started
supervisor   all services of a topology: start in order, stop in waves; the run directory, its lock, and the
             clean-up after a killed supervisor
service      one service: start, wait until ready, restart with growing delays, stop
readiness    the probes of the readiness conditions
process      one child process with its session and its shared memory
rotating_log its log: a pipe, and files that are rotated while it runs
state        the states of a service, and the state file
daemon       the process that `up` leaves behind: its progress pipe, and how `down` ends it
autoscaler   starts and stops instances by the gateways' gauges
control      restart requests to the daemon, over a Unix socket

Why not a library. supervisord is a daemon with a configuration file; it orders starts by priority but waits
for no readiness and knows no dependencies (its issue 122), and restarts a process that ran without a delay.
circus waits a fixed time between starts, restarts without growing delays, and needs ZeroMQ sockets and
tornado. honcho starts everything at once, restarts nothing, and ends all when one process ends. All three
signal a process, its group or its known children; an engine's processes are found by their session alone.
None removes the shared memory of killed processes, nor reports when a restarted service is ready again.
`Backoff` is shorter than the state that tenacity's wait strategies need.
"""
