"""The choice among instances that could all serve a request: filters, scorers with weights, a picker. Pure.

    able instances --filters--> candidates --scorers x weights--> scored --picker--> chosen, with the reason

prompt_blocks   a prompt as a chain of hashes: two prompts share blocks as far as they begin alike
prefix_memory   the blocks that an instance was sent lately: about what its prefix cache holds
instance_state  what this gateway knows of one instance: requests, load, what it was sent
candidates      the request and the instances as filters, scorers and pickers see them
filters         which candidates are left out while others are there
scorers/        how much speaks for each candidate, from 0 to 1; one file each, listed in `table`
pickers         which of the scored candidates it is
decision        the chosen one, the runner-up, and what made the difference
profiles        weights, filters and picker of each stage; those that count where no file says otherwise
profile_file    the file that says otherwise
policy          all of it together, for one stage
"""
