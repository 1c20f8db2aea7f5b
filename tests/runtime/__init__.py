"""Tests of `autopar.runtime`."""
