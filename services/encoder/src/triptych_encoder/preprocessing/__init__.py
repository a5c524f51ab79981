"""Preprocessing in the host: from a job's media to an item for the vision tower. In the order of a job.

preprocessor     all of it, bounded in pixels and in time
bounded_threads  blocking work in threads, bounded together in cost and each in time
cost_budget      a bound on the cost of what runs, or is kept, at once
media_decoders   the decoder of each modality, and what decoding costs
item_schema      checks the form of the processor's output; learned at the start, knows no model
"""
