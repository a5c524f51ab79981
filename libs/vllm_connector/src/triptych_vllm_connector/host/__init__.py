"""What a service's own process needs, before and beside its engine.

budget                  The preallocator's budget: rows of encoder output, bounded by the rows or by the bytes
engine_options          vLLM's command-line options for each role. What the user passes through comes last, so
image_reader            Which decoders vLLM's own image reader may ask, where an instance reads raw images (lo
limits                  How large one item may be for an engine.
model_snapshot          Which files a model is made of: the digest of a local folder's, or the commit of a hub
namespace               Namespace digest: what must be equal for one engine's embeddings to be another's.
platform                Which kind of vLLM runs here.
probing                 What an instance finds out about its machine before it announces its transports.
result_fields           Which of vLLM's options change what an encoder puts out. Names are fields of vLLM's `A
slab_watch              What an instance announces of its transports, kept true over restarts of the store. In
transport_capabilities  What this instance offers for handing over tensors, as it announces it in the registry
unsupported_options     Options of vLLM's that an instance cannot be started with: as parsed, however they wer
"""
