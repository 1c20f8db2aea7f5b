"""Plan stages: the exact plan of each stage of a candidate."""
