"""Which instances there are, and which of them gets a request.

registry_view  the registry as last read
item_limits    how many items of which kind a namespace takes in a request; pure
serving_stage  what of a request an instance is asked for
encode_capacity  how many jobs a namespace's encoders take at once; pure
pairs          which instances serve a model: by themselves, or a pair that shares a request; pure
scheduling/    the choice among instances that could all serve a request: scorers with weights; pure
router         the choice among its records: those that can, and of them the policy's; pure
routing_report what it tells metrics and traces
instances      what all requests share, and how long one waits for an instance
ways           whole, or prefill and decode at two instances; pure
routes         one request's choice: its instances, and others where one fails
"""
