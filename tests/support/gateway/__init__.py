"""FAKES around a real gateway, and what its tests share.

serving              servers of a test's own event loop
fake_encoder         an encoder that follows the protocol and computes nothing
fake_prefill_decode  a prefill_decode, likewise
fake_fabric          fabric agents, likewise, and what the stores have
hosts                a real gateway between hosts: these, and encoders and instances at several stores
system               a real gateway on a real Redis between the two
process              `python -m triptych_gateway` as a process
described_api        schemathesis on what a gateway says of its API, in a process of its own
local_encode         what tests of local encodes share
samples              a model's name, small images, data URLs, and files of API keys
media_server         a server of media that answers as a test tells it
fetching             the gateway's fetcher with bounds for tests, and names that a test chooses
certificates         certificates by an authority of the test
header_bombs         images whose headers cost too much
file_samples         uploads, and what is on the disk
routing              instances for the choice among them, without a registry
spans                spans of the test's own process
"""
