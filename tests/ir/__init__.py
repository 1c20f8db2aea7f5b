"""Tests of autopar.ir."""
