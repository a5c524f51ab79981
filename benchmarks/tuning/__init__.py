"""`tune`: which set-up of `up` serves most requests within their objectives.

grid          the set-ups that are tried, and which of them are tried again (pure)
tune_report   the table (pure)
"""
