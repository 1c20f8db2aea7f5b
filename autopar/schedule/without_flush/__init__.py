"""Pipelines without a flush: their schedules and versions of weights, the lists of all calls, and AMPNet."""
