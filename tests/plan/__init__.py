"""Tests of autopar.plan."""
