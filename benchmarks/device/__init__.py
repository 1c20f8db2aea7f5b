"""Measurements of kernels and whole train steps on one accelerator, as a file that travels.

``python -m benchmarks.device --out FILE`` writes them on a machine that has the device.
"""
