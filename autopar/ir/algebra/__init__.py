"""Products computed in another order: what changes a program's cost and, in exact arithmetic, no value.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1, is the case that it is made for: a
weight that is a sum with a product of low rank.
"""

from autopar.ir.algebra.rewrite import Change, ChangedOperator, Reassociated, reassociated

__all__ = ["Change", "ChangedOperator", "Reassociated", "reassociated"]
