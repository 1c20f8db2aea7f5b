"""From plan and program to what runs: programs on local pieces, and instruction lists."""
