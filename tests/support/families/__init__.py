"""Tiny models with random weights, of many families and modalities, with media and questions for them.

A model is made in seconds, from nothing but the demo model's tokenizer. Its weights are wide, so that other
media give another answer: an answer that equals the monolith's was computed from the right embeddings.

family      what a family is: its maker, which media it takes, and the engine options that it needs
registry    all families, by name
makers/     writes the model folder of a family: config, weights, processor, chat template
folders     makes each folder once, in a process of its own (`make_family`), and keeps it
tokenizer   the demo model's tokenizer with a family's tokens, and a chat template that places media
weights     random weights that are spread wide, saved under the names of published checkpoints
media       images, videos and sounds of several sizes, from seeds
questions   chat requests about them, the same for the same seed; with other media, with media exchanged
answers     what a server answers, as token ids and logprobs; a monolithic vLLM for a family
answer_alone  a program: the answers of one engine in one process, family after family
"""
