"""Decoding of callers' videos, audio and rare images in child processes, which can be ended.

    host: session ──request, descriptors──▶ child: decoders in C
                  ◀──reply─────────────────
                  ◀──frames: shared memory──

A decoder in C cannot be interrupted in a thread. A child has limits on CPU time, wall time and memory; one
that exceeds them, or crashes, is ended, and the item is refused. It imports neither torch nor vLLM: vLLM's
loaders run in the host, and call the objects of `host.video_reader` and `host.audio_reader` instead of
OpenCV, libsndfile and PyAV.

messages   every request and reply, validated on both sides; nothing is pickled
child      the child's main loop, and the decoders
processes  host: starts children, lends each to one item at a time, ends them
images     host and child: which images are decoded in the host, and how pixels travel
"""
