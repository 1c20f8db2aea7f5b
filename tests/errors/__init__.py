"""Tests of autopar.errors."""
