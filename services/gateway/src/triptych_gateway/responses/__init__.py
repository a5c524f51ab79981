"""OpenAI's Responses API. A stored response lives in the instance that made it; every gateway finds it there.

exchange          one request over HTTP: a response is made; a stored one is read or cancelled
response_index    records of stored responses, in Redis
"""
