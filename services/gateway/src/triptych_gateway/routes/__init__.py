"""HTTP routes, each with the parts that it needs. `endpoints.table` lists them.

forwarded  requests for prefill_decode: chat completions, and text in other forms
local      how the others are added
models       /v1/models
files        /v1/files
health       /health, /ping, /health/live, /health/ready, /version and /metrics
docs         /openapi.json and /docs
ui           /ui: the page, its files and its data
media      GET /internal/media/{token}, for encoders; in no table
"""
