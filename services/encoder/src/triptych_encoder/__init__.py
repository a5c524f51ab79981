"""Encoder service: a vLLM engine that runs only the encoder, fed from the `encode-jobs` stream."""
