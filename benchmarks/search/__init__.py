"""A bench for search strategies: problems as files, every strategy under one budget, ranks and anytime curves."""
