"""Differential fuzzing: random programs run planned on eight devices, against the plain function on one."""
