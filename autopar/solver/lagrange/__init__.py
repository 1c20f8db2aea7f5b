"""Large choice problems by Lagrange multipliers, messages and local search; imported when it is used."""
