"""Lowering: from plan and program to programs on local shards, and instruction lists."""
