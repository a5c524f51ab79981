"""What the gateway serves, described once: routing, validation, metrics and the API's description use it.

endpoint         one endpoint: path, methods, kind, what its body holds
bodies           the fields of bodies that the gateway reads
answers          what the gateway itself answers
fields           fields that are passed on: described, and checked
response_fields    those of a response, whose items and tools are of several types
kinds              kinds of their values, with bounds
answer_cost      what the answers to a body cost: tokens × choices × log probabilities
local_endpoints  those that the gateway answers itself
table            those that are forwarded, and all together
openapi          the API's description, made from the table (`/openapi.json`)
docs_page        the same for people, without scripts (`/docs`)
"""
