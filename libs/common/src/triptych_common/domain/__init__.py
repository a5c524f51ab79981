"""Pure rules without I/O: errors, content hashing, which media and options are taken."""
