"""What a careless or hostile caller may send: images and options, the same ones every time."""
