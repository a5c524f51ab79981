"""Locality: the store whose encoders get a job. docs/design/fabric.md explains it.

encode_stores  the stores whose encoders take a namespace's jobs, and what waits for each of them
item_places    stores at which encoders make items, or have them; pure
"""
