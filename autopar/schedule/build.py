"""Builds a checked program from a table and a dataflow."""

from __future__ import annotations

from autopar.schedule.check import check_table
from autopar.schedule.dataflow import Dataflow
from autopar.schedule.flow_check import check_dataflow
from autopar.schedule.instructions import Program
from autopar.schedule.liveness import free_early
from autopar.schedule.offload import offload_activations
from autopar.schedule.place import place
from autopar.schedule.table import Table
from autopar.schedule.verify import verify


def build(table: Table, dataflow: Dataflow, depth: int = 1) -> Program:
    """The instruction lists that carry ``table`` out: placed, freed early, what waits moved to hosts, verified.

    Args:
        table: what each worker computes.
        dataflow: what its works read and write.
        depth: values that a queue between two workers holds.

    Raises:
        ScheduleError: the table cannot run, or the dataflow does not fit it.
    """
    check_table(table)
    check_dataflow(table, dataflow)
    freed = free_early(table, dataflow, place(table, dataflow))
    program = Program(table, dataflow, offload_activations(dataflow, freed))
    verify(program, depth)
    return program
