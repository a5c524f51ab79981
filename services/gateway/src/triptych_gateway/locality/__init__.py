"""Locality: the store whose encoders get a job. docs/design/fabric.md explains it.

job_place      the choice for one job, and its reason; pure
encode_stores  the stores whose encoders take a namespace's jobs, and what waits for each of them
item_places    stores at which encoders make items, or have them; pure
row_estimates  rows and bytes of an item before an encoder reports them; pure
"""
