"""Tests of autopar.frontend."""
