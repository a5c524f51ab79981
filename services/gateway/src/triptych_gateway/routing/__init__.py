"""Routing: the registered instances, and the choice of the one that gets a request.

registry_view  the registry as last read
item_limits    items by modality that a namespace takes in a request; pure
serving_stage  stage of a request at an instance
served_models  the names and shares of models, from `models_file`, which `models_watch` reads again
encode_capacity  number of jobs that a namespace's encoders take at once; pure
pairs          instances that serve a model alone, and pairs that share a request; pure
variants       a model's instances by version and namespace, and a request's choice; pure
route_demand   a request's own routing rules; pure
scheduling/    the choice among instances that could all serve a request: scorers with weights; pure
router         the choice among the registry's records, by the policy; what each was sent; which
               instances share compute with the encoders; pure
routing_report metrics and traces of its decisions
instances      shared by all requests: variants for a request, and the wait for an instance
lost_requests  requests with which instances have ended; the same request again is refused
ways           whole, or prefill and decode at two instances; pure
routes         one request's choice: its instances, and others where one fails
"""
