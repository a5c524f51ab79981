"""Implementations of the commands. Modules import what they need when they run, so that `--help` stays fast.

the system      lifecycle (`up`, `down`, `logs`, and the daemon's main), status, drain,
                scale (`scale`, `stop` and `restart`)
                hosts/: of several hosts;
                demo
inspection      store, streams, trace; clients: their clients of the running system;
                status_tables: what `status` shows of the registry
the machine     doctor
the checkout    bench (`test`, `check`, `bench` and `soak`, which run scripts of the checkout)
"""
