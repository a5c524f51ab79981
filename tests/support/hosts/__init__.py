"""Several hosts on this machine: network namespaces, with a network between them that can be cut and slowed.

namespaces      a namespace, held by a thread; how a thread gets into one; why there are none here
network         hosts, their cables and rates, and which packets are lost
control_redis   Redis on a host of its own
real            real engines on two hosts
layout, system  `tests.support.fast` on them: a store and a fabric agent on each host
"""
