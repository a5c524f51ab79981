"""Bodies that are sent to Triptych and to vLLM's own server alike, by endpoint: one table for each.

case         one body, and what is known of its answer
chat         /v1/chat/completions, with images and without
completions  /v1/completions
others       batches, tokens, models, and what the model does not serve
asking       sends all of them to a server, by OpenAI's client
comparing    whether two answers are the same

A table for another endpoint is a dict of its cases, added to `ALL` in `others`.
"""
