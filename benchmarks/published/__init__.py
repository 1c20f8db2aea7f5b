"""Published training runs against the transformer model: errors, ranking, regret, memory."""
