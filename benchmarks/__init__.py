"""Benchmarks of autopar, each a case of a registry: ``python -m benchmarks [NAME ...]``."""
