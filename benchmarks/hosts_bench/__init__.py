"""Parts of `several_hosts.py`.

throughput   entries of 16 MiB by the fabric's agents, beside a bare socket on the same cable
handovers    three systems at once: an encoder on another host, on the same one, and there without an agent
hosts_report figures as ratios with intervals, against their bars
"""
