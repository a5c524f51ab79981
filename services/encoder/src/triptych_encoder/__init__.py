"""Encoder service: a vLLM engine that runs only the encoder, fed from the jobs of its namespace."""
