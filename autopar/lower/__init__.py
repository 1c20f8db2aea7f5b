"""Lowering: from plan and program to programs on local pieces, and instruction lists."""
