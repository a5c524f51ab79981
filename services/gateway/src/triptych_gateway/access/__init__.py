"""Who may call, and how much at once.

admission      Admission: how many requests, and how many bytes of media, the gateway holds at once. Pure coun
api_keys_file  The file of API keys: a name, the key's SHA-256 and perhaps a tenant each (TOML).
auth           API keys. Off unless keys are set, in the settings or in a file.
callers        Who calls: the name of an API key and the tenant that it belongs to. Neither is a secret; the k
"""
