"""Choice among instances that could all serve a request: filters, weighted scorers, a picker. Pure.

    able instances --filters--> candidates --scorers x weights--> scored --picker--> chosen, with the reason

prompt_blocks   a prompt as a chain of hashes: two prompts share blocks as far as they begin alike
prefix_memory   the blocks that an instance was sent lately: about what its prefix cache holds
instance_state  facts about one instance: requests, load, prompts sent
candidates      the request and the instances as filters, scorers and pickers see them
filters         leave candidates out while others remain
scorers/        rate each candidate from 0 (worst) to 1 (best); one file each, listed in `table`
pickers         choose among the scored candidates
decision        the chosen one, the runner-up, and what made the difference
profiles        weights, filters and picker of each stage, with the built-in ones
profile_file    file that replaces the built-in ones
policy          all of it together, for one stage
"""
