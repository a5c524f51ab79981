"""Other clients of OpenAI's API, each a script of its own process.

    python SCRIPT BASE_URL API_KEY MODEL IMAGE_URL

Each prints what it got as JSON, under the same names.

langchain_client  LangChain's ChatOpenAI
litellm_client    LiteLLM's client of OpenAI's API
running           runs them, with packages of their own where they are not installed
"""
