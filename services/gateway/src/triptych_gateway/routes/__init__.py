"""HTTP routes, each with the parts that it needs. `endpoints.table` lists them.

local        how they are added; `app` has those that are forwarded to a prefill_decode
models       /v1/models
files        /v1/files
health       /health, /ping, /health/live, /health/ready, /version and /metrics
docs         /openapi.json and /docs
ui           /ui: the page, its files and its data
media        GET /internal/media/{token}, for encoders; in no table
"""
