"""Completions of texts and of token ids."""

from typing import Any

from tests.support.real.bodies.case import NULL, Table, table, with_streams

PATH = "/v1/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}
PROMPT = "read the digits 1 2 3"
ASKED = {"prompt": PROMPT}

_TEXTS: dict[str, dict[str, Any]] = {
    "plain": ASKED,
    "default length": ASKED | {"max_tokens": None},
    "no model": ASKED | {"model": None},
    "several prompts": {"prompt": [PROMPT, "digits", "read"]},
    "token ids": {"prompt": [5, 6, 7, 8]},
    "lists of token ids": {"prompt": [[5, 6, 7], [8, 9]]},
    "n": ASKED | {"n": 3, "temperature": 1.0, "seed": 11},
    "n of several prompts": {"prompt": [PROMPT, "digits"], "n": 2, "temperature": 0.7, "seed": 3},
    "logprobs": ASKED | {"logprobs": 3},
    "echo": ASKED | {"echo": True},
    "echo with logprobs": ASKED | {"echo": True, "logprobs": 2},
    "echo alone": ASKED | {"echo": True, "max_tokens": 0},
    "prompt logprobs": ASKED | {"prompt_logprobs": 1},
    "stop": ASKED | {"stop": ["1", "2", " "], "max_tokens": 24},
    "stop included": ASKED | {"stop": [" "], "include_stop_str_in_output": True, "max_tokens": 24},
    "stop by token": ASKED | {"stop_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]},
    "ignore eos": ASKED | {"ignore_eos": True, "min_tokens": 8},
    "penalties": ASKED | {"presence_penalty": 0.5, "frequency_penalty": 0.4, "seed": 2},
    "logit bias": ASKED | {"logit_bias": {"7": 100.0}},
    "token ids in the answer": ASKED | {"return_token_ids": True},
    "unknown field": ASKED | {"not_known_to_anyone": 1},
    "null fields": ASKED | {"stop": NULL, "logprobs": NULL, "seed": NULL, "suffix": NULL},
    "regex": ASKED | {"structured_outputs": {"regex": "[0-9]{2}"}},
    "truncated": ASKED | {"truncate_prompt_tokens": 2},
    "without special tokens": ASKED | {"add_special_tokens": False},
}
_FAULTY: dict[str, dict[str, Any]] = {
    "negative length": ASKED | {"max_tokens": -1},
    "negative temperature": ASKED | {"temperature": -1},
    "too many logprobs": ASKED | {"logprobs": 1000},
    "negative logprobs": ASKED | {"logprobs": -2},
    "n is none": ASKED | {"n": 0},
    "suffix": ASKED | {"suffix": "x"},
    "too long": {"prompt": "read the digits " * 4000},
    "no token": {"prompt": [10**9]},
    "stream options without a stream": ASKED | {"stream_options": {"include_usage": True}},
    "priority": ASKED | {"priority": 3},
    "no prompt": {},
    "null prompt": {"prompt": NULL},
    "empty list": {"prompt": []},
    "best of": ASKED | {"best_of": 2, "n": 3},
    "echo of a stream of logprobs": ASKED | {"echo": True, "prompt_logprobs": 1, "stream": True},
    "top_p above": ASKED | {"top_p": 7},
}
_FOUND_BY_THE_GATEWAY: dict[str, dict[str, Any]] = {
    "unknown model": ASKED | {"model": "other"},
    "prompt of objects": {"prompt": [{"a": 1}]},
    "n as text": ASKED | {"n": "many"},
    "stream as text": ASKED | {"stream": "perhaps"},
}
_NOT_COMPILED: dict[str, dict[str, Any]] = {  # by Triptych's own process for grammars
    "bad regex": ASKED | {"structured_outputs": {"regex": "("}},
}

TABLE: Table = {
    **with_streams(table(PATH, _TEXTS, GREEDY)),
    **table(PATH, _FAULTY, GREEDY),
    **table(PATH, _FOUND_BY_THE_GATEWAY, GREEDY, own_words=True),
    **table(PATH, _NOT_COMPILED, GREEDY, own_words=True),
}
