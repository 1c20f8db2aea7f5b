"""Lowering of pipelines: from a plan to stage programs and instruction lists."""
