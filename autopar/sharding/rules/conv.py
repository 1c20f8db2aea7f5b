"""The rule of ``conv_general_dilated``: batch, features and feature groups are factors; spatial dims stay whole."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autopar.ir import Operator, TensorType
from autopar.sharding.factors import Rule, RuleFunction
from autopar.sharding.loops import parallel, rule_of
from autopar.sharding.rules.dot import contracted, product_groups


def conv_general_dilated(op: Operator, operand_types: tuple[TensorType, ...]) -> Rule | None:
    """Convolutions with any order of dims, grouped or not.

    Groups of features (``feature_group_count``) are the major part of the input features, the kernel's
    output features and the result's features: splitting the groups cuts all three into pieces that match.
    Groups of the batch (``batch_group_count``, which kernel gradients of grouped convolutions have) are the
    major part of the input's batch dim, the kernel's output features and the result's features. Within a
    group a dim is not contiguous pieces of the whole, so nothing else of a grouped dim is a factor.
    """
    left, kernel = operand_types
    result = op.results[0].type
    batch, feature = op.ints("lhs_spec")[:2]
    kernel_out, kernel_in = op.ints("rhs_spec")[:2]
    result_batch, result_feature = op.ints("out_spec")[:2]
    groups, batch_groups = op.integer("feature_group_count"), op.integer("batch_group_count")
    if groups > 1 and batch_groups > 1:
        return None
    loops = []
    if batch_groups == 1:
        loops.append(parallel(left.shape[batch], (0, batch), (2, result_batch)))
    if groups > 1:
        loops.append(parallel(groups, (0, feature), (1, kernel_out), (2, result_feature)))
    elif batch_groups > 1:
        loops.append(parallel(batch_groups, (0, batch), (1, kernel_out), (2, result_feature)))
    else:
        loops.append(parallel(kernel.shape[kernel_out], (1, kernel_out), (2, result_feature)))
    if groups == 1:
        loops += contracted(left.shape[feature], result, (0, feature), (1, kernel_in))
    return rule_of(loops, op, operand_types, product_groups(operand_types, result))


RULES: Mapping[str, RuleFunction] = MappingProxyType({"conv_general_dilated": conv_general_dilated})
