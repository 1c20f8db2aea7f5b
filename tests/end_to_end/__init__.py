"""Tests of running: the values are those of the undecorated function."""
