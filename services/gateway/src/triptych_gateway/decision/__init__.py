"""Decisions: encoders encode a request's media, or an instance with a vision tower does.

In the order of a decision; all but the first two and `instance_load` are pure.

encode_decisions     one per gateway: gathers what a decision needs; owns what is indented
redis_reads            other gateways' jobs, and encoders that may come back
prefixes               prompts that an instance has computed, as far as its caches may have them
instance_load          this gateway's work before each instance, and requests that wait here for room
namespace_decisions    one per namespace: decides, and learns from the outcome
decision_policy          remote or local, with a reason
prediction               the seconds that a request would wait for its first token, either way; its work
serving_costs            measured costs of encode and prefill; rows of an image
"""
