"""Slices of tokens: which values of a causal step a slice of a sequence needs, proven on the graph.

Rules for splitting over devices say it, as they do for microbatches: see `analyze_tokens`.
"""

from autopar.microbatch.tokens.analyze import analyze_tokens, token_count
from autopar.microbatch.tokens.states import OperatorSlice, TokenSlicing, TokenState

__all__ = ["OperatorSlice", "TokenSlicing", "TokenState", "analyze_tokens", "token_count"]
