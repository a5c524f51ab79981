"""Forms of chats: fields of the body, places of media, and texts that vLLM joins.

form         functions that read a body by its form; bounds
messages     Anthropic's Messages API
responses    OpenAI's Responses API

grammar_bounds  bounds of a body's schemas, regular expressions and grammars, in any form
"""
