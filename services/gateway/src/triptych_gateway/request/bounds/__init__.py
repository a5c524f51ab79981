"""Bounds of a parsed body's fields, apart from its inputs.

field_bounds   the checks of all fields, and of what they cost together
shapes         kinds and numbers of values, by the schemas of the endpoints
"""
