"""Tests of `autopar.report`."""
