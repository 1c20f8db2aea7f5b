"""Slices of tokens: which values of a causal step a slice of a sequence needs, proven on the graph.

Rules for splitting over devices say it, as they do for microbatches: see `analyze_tokens`.
"""

from autopar.microbatch.tokens.analyze import TokenStart, analyze_from, analyze_tokens, facts_of, token_count
from autopar.microbatch.tokens.facts import fact_of_literal
from autopar.microbatch.tokens.slice_graph import (
    SliceGraph,
    TokenSlices,
    check_lengths,
    owed_to,
    rows_of,
    slice_graph,
    spread_of,
)
from autopar.microbatch.tokens.states import OperatorSlice, TokenSlicing, TokenState

__all__ = [
    "OperatorSlice",
    "SliceGraph",
    "TokenSlices",
    "TokenSlicing",
    "TokenStart",
    "TokenState",
    "analyze_from",
    "analyze_tokens",
    "check_lengths",
    "fact_of_literal",
    "facts_of",
    "owed_to",
    "rows_of",
    "slice_graph",
    "spread_of",
    "token_count",
]
