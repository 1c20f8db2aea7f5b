"""The row that 1F1B and its relatives share: some forwards first, then one backward for each forward."""

from __future__ import annotations

from autopar.schedule.table import Task


def warm_up_row(stage: int, num_microbatches: int, in_flight: int) -> tuple[Task, ...]:
    """Forwards until ``in_flight`` microbatches are under way, then backward and forward in turn, then backwards."""
    row = [Task("forward", stage, k) for k in range(min(in_flight, num_microbatches))]
    for microbatch in range(num_microbatches):
        row.append(Task("backward", stage, microbatch))
        if microbatch + in_flight < num_microbatches:
            row.append(Task("forward", stage, microbatch + in_flight))
    return tuple(row)


def zero_bubble_row(stage: int, num_microbatches: int, in_flight: int, limit: int) -> tuple[Task, ...]:
    """The same with weight gradients as tasks that wait until their time costs nothing, or their memory is wanted.

    Args:
        stage: the stage.
        num_microbatches: parts of the batch.
        in_flight: microbatches between forward and backward.
        limit: microbatches between forward and weight gradient.
    """
    row: list[Task] = []
    forward = backward = weight = 0
    while weight < num_microbatches:
        wants_forward = forward < num_microbatches and forward - backward < in_flight
        if wants_forward and forward - weight < limit:
            row.append(Task("forward", stage, forward))
            forward += 1
        elif wants_forward and weight < backward:
            row.append(Task("weight", stage, weight))
            weight += 1
        elif backward < num_microbatches:
            row.append(Task("backward", stage, backward))
            backward += 1
            if forward == num_microbatches:  # while it drains, the next backward is not there at once
                row.append(Task("weight", stage, weight))
                weight += 1
        else:
            row.append(Task("weight", stage, weight))
            weight += 1
    return tuple(row)
