"""Locality: the store whose encoders get a job. docs/design/fabric.md says why.

job_place      the choice for one job, and its reason; pure
encode_stores  the stores whose encoders take a namespace's jobs, and what waits for each of them
item_places    at which store encoders make items, or have them, where there are several; pure
row_estimates  how many rows and bytes an item will have, before an encoder has told; pure
"""
