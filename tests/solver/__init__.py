"""Tests of `autopar.solver`."""
