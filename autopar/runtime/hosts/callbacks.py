"""Exceptions of Python callbacks, raised in all processes of a step: in the others as `CallbackError`.

`check_callbacks` is called by every process when it has started its part of a step. An exception that left its callback
would end the program of one process, for whose sends the others wait; so it is kept until the step is over.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from autopar._compat.world import World, world
from autopar.errors import CallbackError
from autopar.errors.base import as_kind
from autopar.lower.callbacks import Callbacks
from autopar.runtime.hosts.agree import Agreement
from autopar.runtime.hosts.watch import short_text


def check_callbacks(callbacks: Callbacks, results: Any) -> None:
    """Waits for a step with callbacks and raises what one of any process has raised.

    Args:
        callbacks: of the step's programs, which all processes know to have some or none.
        results: of the step, those of this process.

    Raises:
        JaxRuntimeError: a callback of this process raised; it has the text, and the exception as its cause.
        CallbackError: one of another process did; it is a JaxRuntimeError too.
        ClusterError: a callback waited for threads that its own step holds.
        ProcessLostError: a process is gone.
    """
    joined_world = world()
    if joined_world is None or not callbacks.guards:
        callbacks.check(results)
        return
    error_here: Exception | None = None
    try:
        callbacks.check(results)
    except Exception as error:
        error_here = error
    reasons = _reasons(joined_world, error_here)
    if error_here is not None:
        raise error_here
    if reasons:
        raise as_kind(_error(reasons), jax.errors.JaxRuntimeError)


def _reasons(world: World, error_here: Exception | None) -> dict[int, str]:
    """Exceptions of all processes that have one, by process.

    Args:
        world: the processes.
        error_here: the exception of this process.
    """
    said = "" if error_here is None else short_text(error_here.__cause__ or error_here)
    # A callback may take as long as it likes, and the processes without it come first.
    turn = Agreement.next(world, "the end of a step with callbacks", math.inf)
    texts = [raw.decode(errors="replace") for raw in turn.gather(said.encode())]
    return {process: text for process, text in enumerate(texts) if text}


def _error(reasons: dict[int, str]) -> CallbackError:
    first = min(reasons)
    facts = ", ".join(f"{text} in process {process}" for process, text in sorted(reasons.items()))
    return CallbackError(
        f"a callback of the step raised {facts}",
        cause="the exception is of the user's Python function; the step ran to its end with zeros in place of results",
        remedy=f"look at the exception in process {first}, which has its traceback; the results of the step before "
        "can be given again unless they are donated",
        process=first,
    )
