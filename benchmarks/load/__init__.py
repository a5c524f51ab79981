"""Requests to any OpenAI endpoint, and figures of their answers.

contents       images and texts that no cache can know, from a seed
client         one streamed chat request, with the time of every token
figures        what a group of answers comes to: percentiles, stalls, goodput (pure)
intervals      ratios of paired repeats, with bootstrap confidence intervals (pure)
json_reports   reports as JSON files
"""
