"""Encode jobs: taken, worked on, reported.

flight        One job at this encoder: for whom it works, and what they have been told.
job           One encode job, from the stream to the seal.
job_leases    The flights that this encoder works on: which jobs it shall do at all, and their leases in Redis
ledger        Ledger: which (request, item)s still wait for a sealed entry, so how long the encoder keeps its
media_source  Where a job's media come from: inside the job, or from the gateway that keeps them.
replies       Listens to what the consumers say (`preallocations`, `acks`) and ends the producer's pins.
reporter      What the encoder tells the others about a job, each in the job's own trace.
"""
