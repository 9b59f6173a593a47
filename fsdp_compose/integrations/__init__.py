"""Doors of frameworks that let somebody choose what shards: one file for each framework that needs one.

Each imports its framework, and is imported by it, or by its user. No other wing imports this one.
"""
