"""HTTP routes, each with the parts that it needs.

chat    POST /v1/chat/completions
models  GET /v1/models
files   /v1/files
media   GET /internal/media/{token}, for encoders
health  GET /health/live, /health/ready and /metrics
"""
