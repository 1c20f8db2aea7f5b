"""Tests of `autopar.lower`."""
