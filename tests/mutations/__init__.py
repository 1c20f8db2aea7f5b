"""Faults put into autopar one at a time, and the share of them that the tests catch.

``python -m tests.mutations`` copies the tree once a fault, puts the fault in and runs the tests that should see it.
"""
