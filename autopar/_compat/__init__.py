"""The only place with version branches for jax, and with names that jax does not promise."""
