"""Tests of `autopar.sharding`."""
