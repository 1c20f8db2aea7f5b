"""Partition: layers into stages on submeshes by dynamic programming (Alpa, OSDI'22, section 5)."""
