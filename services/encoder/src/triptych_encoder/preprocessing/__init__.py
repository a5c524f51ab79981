"""From a job's media to an item that the vision tower takes.

bounded_threads  Blocking work in threads, bounded together in cost and each in time.
decoding         From an image's bytes to its pixels: exactly the image that the gateway saw, or nothing.
item_schema      The form of what the model's processor makes, learned from images of our own. Knows no model.
preprocessor     From a job and its media to an item that the tower takes, bounded in pixels and in time.
"""
