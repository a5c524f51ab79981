"""Decisions: encoders encode a request's media, or an instance with a vision tower does.

In the order of a decision; all but the first two and `local_room` are pure.

encode_decisions     one per gateway: gathers what a decision needs; owns what is indented
encode_override        requests that may decide themselves; pure
shared_queue           the jobs of other gateways
local_prefixes         prompts, up to an item, that an instance has encoded itself
instance_load          the work that this gateway has put before each instance, and the streams there
local_room             requests that wait here for room at an instance that will encode them
namespace_decisions    one per namespace: decides, and learns from the outcome
decision_policy          remote or local, with a reason
idle_ways                the quicker way on an idle system, where both share compute
prediction               the seconds that a request would wait for its first token, either way
serving_costs            measured costs of encode and prefill; rows of an image
linear_cost                seconds as a line over an amount, from the latest observations
held_prefixes        conversations that a decode instance has answered; separate from the others
decision_figures     facts behind a decision, for the trace
courses              predicted work of a request at its instance
"""
