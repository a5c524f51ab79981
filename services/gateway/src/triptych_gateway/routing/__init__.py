"""Which instances there are, and which of them gets a request.

registry_view  the registry as last read
item_limits    how many items of which kind a namespace takes in a request; pure
encode_capacity  how many jobs a namespace's encoders take at once; pure
router         the choice among its records: fewest requests in flight; pure
instances      one request's choice: waits for an instance, and takes another where one fails
"""
