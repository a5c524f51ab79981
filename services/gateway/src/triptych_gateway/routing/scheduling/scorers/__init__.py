"""Scorers: rate each candidate from 0 (worst) to 1 (best). One a file, all of them in `table`.

prefix      share of the prompt that it was sent before
session     it is the one that the conversation belongs to
media       share of the request's items that it was sent before
media_near  share of the request's items that its store has
queue       few requests before this one, of all gateways
kv          room in its KV cache
lora        it used the request's LoRA adapter lately
hardware    number of requests that it works on at once
tokens      little text in its requests, of this gateway
table       all of them by name
"""
