"""Shardings that experts write by hand, and how many bytes they move next to autopar's."""
