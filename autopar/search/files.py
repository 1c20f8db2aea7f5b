"""Problems as files: graph, cluster and job, so that searches are compared on the same things."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from autopar._compat.files import write_whole
from autopar.cluster import Cluster
from autopar.cost import CostModel
from autopar.errors import AutoparError
from autopar.ir.text import GraphSyntaxError, graph_text, parse_graph
from autopar.ir.verify import verify
from autopar.search.constraints import Constraint
from autopar.search.job import Job
from autopar.search.problem import Problem

_VERSION = 1


def save_problem(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Writes a problem as JSON, compressed if the name ends in ``.gz``; the same problem gives the same bytes.

    What limits a search (time, steps, seed) is not in it, nor is the source: one stage is planned of what is read.
    """
    job = problem.job
    data = {
        "autopar_problem": _VERSION,
        "cluster": json.loads(problem.cluster.to_json()),
        "options": {
            "donated": sorted(job.donated),
            "memory_limit_bytes": job.memory_limit_bytes,
            "mesh_shape": None if job.mesh_shape is None else list(job.mesh_shape),
            "num_microbatches": job.num_microbatches,
            **(
                {"constraints": [[c.value, list(c.shards), c.text, c.axes] for c in job.constraints]}
                if job.constraints
                else {}
            ),
        },
        "graph": graph_text(problem.graph),
    }
    text = (json.dumps(data, indent=1) + "\n").encode()
    write_whole(path, gzip.compress(text, mtime=0) if os.fspath(path).endswith(".gz") else text)


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """The problem in a file of `save_problem`. Raises AutoparError where the file holds none."""
    try:
        raw = Path(path).read_bytes()
        data: Any = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        if data["autopar_problem"] != _VERSION:
            raise AutoparError(
                f"{os.fspath(path)} has version {data['autopar_problem']}; this autopar reads {_VERSION}"
            )
        graph = parse_graph(data["graph"])
        cluster = Cluster.from_dict(data["cluster"])
        o = data["options"]
        shape = o["mesh_shape"]
        job = Job(
            mesh_shape=None if shape is None else tuple(shape),
            memory_limit_bytes=o["memory_limit_bytes"],
            donated=frozenset(o["donated"]),
            num_microbatches=o["num_microbatches"],
            constraints=tuple(_constraint(*c) for c in o.get("constraints", ())),
        )
    except (OSError, EOFError, RecursionError, ValueError, KeyError, TypeError, GraphSyntaxError) as error:
        raise AutoparError(
            f"{os.fspath(path)} holds no problem: {error}", remedy="write it with save_problem"
        ) from error
    verify(graph)
    return Problem(graph, cluster, CostModel(cluster), job=job)


def _constraint(value: str, shards: list[int], text: str, axes: list[list[str]] | None) -> Constraint:
    return Constraint(value, tuple(shards), text, None if axes is None else tuple(map(tuple, axes)))
