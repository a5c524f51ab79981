"""HTTP routes, one module each."""
