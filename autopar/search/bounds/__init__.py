"""What no plan of a step does without: what lies in memory, and how stages and microbatches share the work."""
