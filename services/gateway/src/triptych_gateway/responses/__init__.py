"""OpenAI's Responses API. A stored response lives in the instance that made it; every gateway finds it there.

exchange          one request over HTTP: a response is made; a stored one is read or cancelled
response_request  the body of one that is to be made
continuation      a request that goes on from a stored response: its instance, and the images that it has
response_index    records of stored responses, in Redis
response_record   one of them
kept_images       bytes of images of stored responses, as many as there is room for
"""
