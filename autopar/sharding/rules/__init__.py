"""Sharding rules, a file for each family of primitives. Every file has a table ``RULES``."""
