"""Shardings that experts write by hand, and how many bytes they move beside autopar's."""
