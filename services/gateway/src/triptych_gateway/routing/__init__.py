"""Routing: the registered instances, and the choice of the one that gets a request.

registry_view  the registry as last read
served_models  the names and shares of models, from `models_file`
pairs          instances that serve a model alone, and pairs that share a request; pure
variants       a model's instances by version and namespace, and a request's choice; pure
scheduling/    the choice among instances that could all serve a request: scorers with weights; pure
router         the choice among the registry's records, by the policy; what each was sent; which
               instances share compute with the encoders; pure
instances      shared by all requests: variants for a request, and the wait for an instance
routes         one request's choice: its instances, and others where one fails
"""
