"""Pipeline schedules: who computes what when, as tables, and the instruction lists that carry them out.

    table = autopar.schedule.get("1f1b").table(num_stages=4, num_microbatches=8)
    program = autopar.schedule.build(table, dataflow)

`build` runs the passes: `place` (sends and receives), `free_early` (donation, FREE), `offload_activations` and
`verify`.
"""

from autopar.schedule.base import Schedule
from autopar.schedule.build import build, place
from autopar.schedule.check import check_barrier, check_dataflow, check_table
from autopar.schedule.dataflow import Dataflow, ValueRef, ValueSpec, Work, WorkSpec, chain, work_of
from autopar.schedule.instructions import (
    NONE,
    Accumulate,
    Apply,
    Buffer,
    Fetch,
    Free,
    Instruction,
    Offload,
    Program,
    Recv,
    Run,
    Send,
    Stash,
    WorkerProgram,
    blocked_text,
    instruction_text,
    made_by,
    used_by,
)
from autopar.schedule.liveness import free_early
from autopar.schedule.memory import BufferUsage, buffer_bytes, starting_buffers, transit_bytes, usage
from autopar.schedule.offload import offload_activations
from autopar.schedule.registry import (
    ENTRY_POINTS,
    check_schedule,
    factory_named,
    get,
    register,
    schedules,
    table_of,
)
from autopar.schedule.table import Kind, Table, Task, marked_text, run_round_robin, table_text
from autopar.schedule.user_table import parse_table, to_csv, to_json, to_text
from autopar.schedule.verify import Verified, verify

__all__ = [
    "ENTRY_POINTS",
    "NONE",
    "Accumulate",
    "Apply",
    "Buffer",
    "BufferUsage",
    "Dataflow",
    "Fetch",
    "Free",
    "Instruction",
    "Kind",
    "Offload",
    "Program",
    "Recv",
    "Run",
    "Schedule",
    "Send",
    "Stash",
    "Table",
    "Task",
    "ValueRef",
    "ValueSpec",
    "Verified",
    "Work",
    "WorkSpec",
    "WorkerProgram",
    "blocked_text",
    "buffer_bytes",
    "build",
    "chain",
    "check_barrier",
    "check_dataflow",
    "check_schedule",
    "check_table",
    "factory_named",
    "free_early",
    "get",
    "instruction_text",
    "made_by",
    "marked_text",
    "offload_activations",
    "parse_table",
    "place",
    "register",
    "run_round_robin",
    "schedules",
    "starting_buffers",
    "table_of",
    "table_text",
    "to_csv",
    "to_json",
    "to_text",
    "transit_bytes",
    "usage",
    "used_by",
    "verify",
    "work_of",
]
