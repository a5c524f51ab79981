"""Endpoints of the gateway, described once for routing, validation, metrics and the API's description.

endpoint         one endpoint: path, methods, kind, what its body holds
fields           the fields of each endpoint's body that are passed on: described, and checked
response_fields    those of a response, whose items and tools are of several types
kinds              JSON schemas of single values, with bounds: `response_format`, `stream_options`, tools
answer_cost      cost of the answers to a body: tokens × choices × log probabilities
local_endpoints  those that the gateway answers itself
table            those that are forwarded, and all together
openapi          the API's description, made from the table (`/openapi.json`)
"""
