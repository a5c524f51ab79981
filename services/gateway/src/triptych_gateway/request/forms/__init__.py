"""Forms of chats: which fields a body has, where its media stand, which of its texts come together.

form         what is read of a body by its form; bounds
completions  OpenAI's chat completions
messages     Anthropic's Messages API
responses    OpenAI's Responses API

grammar_bounds  what a schema, a regular expression or a grammar of a body may hold, in any form
"""
