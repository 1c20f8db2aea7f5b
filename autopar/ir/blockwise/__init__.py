"""Attention in blocks: cores of attention that are found in a graph, and each written as one operator.

`find` recognizes scores, softmax and product with the values, forward and backward; `blockwise` puts an operator
``attention`` or ``attention_backward`` in the place of each, which keeps no scores from one pass to the other.
Liu et al., "Ring Attention with Blockwise Transformers", 2023; Dao et al., "FlashAttention", 2022.
"""

from autopar.ir.blockwise.matches import AttentionCore
from autopar.ir.blockwise.recognize import find
from autopar.ir.blockwise.rewrite import Blockwise, blockwise
from autopar.ir.blockwise.spec import ATTENTION, BACKWARD, AttentionSpec

__all__ = ["ATTENTION", "BACKWARD", "AttentionCore", "AttentionSpec", "Blockwise", "blockwise", "find"]
