"""Pure rules without I/O: errors, content hashing."""
