"""Which instances there are, and which of them gets a request.

registry_view  the registry as last read
item_limits    how many items of which kind a namespace takes in a request; pure
serving_stage  what of a request an instance is asked for
served_models  the names and shares of models, from `models_file`, which `models_watch` reads again
encode_capacity  how many jobs a namespace's encoders take at once; pure
pairs          which instances serve a model: by themselves, or a pair that shares a request; pure
variants       a model's instances by version and namespace; which of these a request gets; pure
route_demand   what a request says of where it may go; pure
scheduling/    the choice among instances that could all serve a request: scorers with weights; pure
router         the choice among its records: those that can, and of them the policy's; pure
routing_report what it tells metrics and traces
instances      what all requests share, which variants one may go to, and how long it waits for an instance
lost_requests  requests with which instances have ended: the same one again is refused
ways           whole, or prefill and decode at two instances; pure
routes         one request's choice: its instances, and others where one fails
"""
