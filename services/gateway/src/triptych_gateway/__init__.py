"""Gateway: the OpenAI-compatible front of Triptych.

Life of a request, in the order of the modules it passes:

    exchange        one HTTP request from its first byte to its last
      auth          whose API key it is (api_keys_file); callers: its tenant, and the tenant's salt
      admission     bounded requests in flight
      chat_request  validation, content_parts finds the media, placeholder_tokens guards the text,
                    request_options the options
      media         data URL -> bytes, image_header and polyglots check them, mm_hash; media_shelf keeps them
                    for the encoders
      router        which prefill_decode, over what registry_view knows
      encode_orders one job per mm_hash (item_table is its pure state), sizes when known
      encode_wait   how long encoders are waited for
      final_acks    tells encoders of requests that prefill_decode will not speak of
      dispatch      the body for prefill_decode: metadata instead of media
      upstream      HTTP to prefill_decode, up to its first chunk; then streaming to the client
"""
