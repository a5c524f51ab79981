"""Which instances there are, and which of them gets a request.

registry_view  the registry as last read
item_limits    how many items of which kind a namespace takes in a request; pure
served_models  the names and shares of models, from `models_file`, which `models_watch` reads again
variants       a model's instances by version and namespace; which of these a request gets; pure
route_demand   what a request says of where it may go; pure
router         the choice among its records: fewest requests in flight; pure
instances      one request's choice: waits for an instance, and takes another where one fails
"""
