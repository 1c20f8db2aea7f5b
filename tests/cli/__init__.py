"""Tests of `autopar.cli`."""
