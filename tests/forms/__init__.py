"""Programs generated from jax's own functions and forms, run in six ways against the plain function."""
