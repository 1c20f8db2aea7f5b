"""Values of a plan's inputs as a pytree like the arguments of the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.frontend import Traced


def input_tree(traced: Traced) -> Callable[[list[Any]], Any]:
    """Specs of the inputs as a pytree like the arguments; by path where a container refuses them."""
    signature = traced.signature
    paths = [path for path, _, _ in traced.arguments]

    def tree(specs: list[Any]) -> Any:
        try:
            args, kwargs = signature.arguments(specs[: len(paths)])
        except Exception:
            return dict(zip(paths, specs, strict=False))
        return (args, kwargs) if kwargs else args

    return tree
