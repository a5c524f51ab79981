"""Uploaded files, which many requests can name. In the order of a file:

upload_form     a multipart body, parsed as it comes; pure
uploads         one upload: received, checked, kept
file_store      the directory: one folder for each API key; owns what is indented
partial_file      a file that is being written, and one that is being read
file_record       facts kept beside its bytes, as JSON
directory_use     use of the directory, and remains of dead gateways
encode_ahead    orders a new file's encode, when nothing else is to be encoded
file_service    all of it, as the routes have it

What is on disk is the only truth: several gateways may share the directory. Every step on it blocks, and is
taken in a thread.
"""
