"""Which requests with media encoders get, and which an instance with a vision tower encodes itself.

In the order of a decision; all but the first two and `local_room` are pure.

encode_decisions     one per gateway: gathers what a decision needs; owns what is indented
encode_override        whether a request may say it itself; pure
shared_queue           the jobs of other gateways
local_prefixes         which prompts, up to an item, an instance has encoded itself
instance_load          the work that this gateway has put before each instance, and the streams there
local_room             the requests that wait here for room at an instance that will encode them
namespace_decisions    one per namespace: decides, and learns from what came of it
decision_policy          remote or local, with a reason
idle_ways                which way was quicker on an idle system, where both compute on the same
prediction               the seconds that a request would wait for its first token, either way
serving_costs            what encoding and prefill cost, as this gateway has seen it; the rows of an image
linear_cost                seconds as a line over an amount, from the latest observations
held_prefixes        which conversations an instance that decodes has answered: apart from the others
decision_figures     what a decision was made from, for the trace
courses              what a request does at its instance, as it was predicted
"""
