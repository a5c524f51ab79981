"""Choice among instances that could all serve a request: filters, weighted scorers, a picker. Pure.

    able instances --filters--> candidates --scorers x weights--> scored --picker--> chosen, with the reason

instance_state  facts about one instance: requests, load, prompts sent
candidates      the request, its prompt and the instances as a choice sees them; the decision
profiles        scorers, filters and pickers; their weights for each stage, with the built-in ones
"""
