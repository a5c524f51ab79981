"""Tables of `status`, read from the registry and the store.

instance_table    every instance, of a system that `up` has not started
compute_table     engines: on what each computes, and how that is shared
shortfalls        what is served less than was asked for, one line each
transport_table   pairs of encoder and prefill_decode: by which transport tensors go
"""
