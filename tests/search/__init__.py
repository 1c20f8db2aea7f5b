"""Tests of `autopar.search`."""
