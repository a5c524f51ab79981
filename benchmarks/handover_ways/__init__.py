"""Parts of `handover.py`.

ways      one class per way from a producer's tensor to a consumer's: the store, Redis, files, shared memory
peers     producer and consumer processes, and the pipes between them and the benchmark
kept      the regime in which tensors stay: bounds, and times one after another
dirty     written bytes that are not on the disk yet
results   the runs as numbers and as text
plots     the plots of a report; svg: one of them, drawn
"""
