"""Which instances there are, and which of them serves a request.

registry_view  What this gateway knows of the other instances: read from the registry again and again, kept in
router         Router: which prefill_decode serves a request. Pure; `now` is an argument.
"""
