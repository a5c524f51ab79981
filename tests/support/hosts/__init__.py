"""Several hosts on this machine: network namespaces, with a network between them that can be cut and slowed.

entering        how a thread gets into a namespace
namespaces      a namespace, held by a thread; why there are none here
packet_filters  which packets are lost, as a program of the kernel's
network         hosts, their cables, losses and rates
control_redis   Redis on a host of its own
real            real engines on two hosts
command_line    `./triptych` on one of them
layout, system  `tests.support.fast` on them: a store and a fabric agent on each host
far_redis       the same, with Redis far away from all of them
"""
