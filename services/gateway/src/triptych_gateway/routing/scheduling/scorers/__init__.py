"""How much speaks for each candidate, from 0 to 1: one scorer a file, all of them in `table`.

prefix      how much of the prompt it was sent before
session     it is the one that the conversation belongs to
media       how many of the request's items it was sent before
media_near  how many of the request's items its store has
queue       few requests before this one, of all gateways
kv          room in its KV cache
lora        it used the request's LoRA adapter lately
hardware    how many requests it works on at once
tokens      little text in its requests, of this gateway
table       all of them by name
"""
