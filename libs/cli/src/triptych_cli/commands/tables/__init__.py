"""Tables of `status`, read from the registry and the store.

instance_table    every instance, of a system that `up` has not started
compute_table     engines: on what each computes, and how that is shared
transport_table   pairs of encoder and prefill_decode: by which transport tensors go
"""
