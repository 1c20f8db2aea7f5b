"""CPU seconds of one fixed piece of work, by which seconds of different machines and days can be compared.

`seconds` is where a caller starts. The work is written out here and uses nothing of autopar: a change of the planner
does not change it. Like planning it is mostly Python over small objects, and numpy over small arrays.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import time

import numpy as np

from benchmarks.report import Report, Say

SIZE, REPEATS = 16, 3


def seconds(size: int = SIZE, repeats: int = REPEATS) -> float:
    """Least CPU seconds of the work in this process.

    Args:
        size: of the work; seconds of different sizes do not compare.
        repeats: how often it is done.
    """
    taken_s = []
    for _ in range(repeats):
        began_s = time.process_time()
        work(size)
        taken_s.append(time.process_time() - began_s)
    return min(taken_s)


def work(size: int) -> str:
    """The piece of work; a digest of all that it computed, in whole numbers."""
    digest = hashlib.sha256()
    for n in range(size):
        for part in (_paths(n), _tables(n), _texts(n)):
            digest.update(str(part).encode())
    return digest.hexdigest()


def _numbers(seed: int, count: int) -> list[int]:
    """Numbers of a linear congruential generator (Park and Miller, 1988), below 2^31."""
    state, numbers = seed * 7919 + 1, []
    for _ in range(count):
        state = state * 48271 % 2147483647
        numbers.append(state)
    return numbers


def _paths(seed: int) -> int:
    """Shortest paths from one node of a graph of 3,000 nodes and 12,000 edges: dictionaries, tuples, a heap."""
    nodes, edges = 3000, 12000
    drawn = _numbers(seed, 3 * edges)
    graph: dict[int, list[tuple[int, int]]] = {node: [] for node in range(nodes)}
    for a, b, length in zip(drawn[::3], drawn[1::3], drawn[2::3], strict=True):
        graph[a % nodes].append((b % nodes, length % 1000))
    least = {0: 0}
    heap = [(0, 0)]
    while heap:
        far, node = heapq.heappop(heap)
        if far == least[node]:
            for other, length in graph[node]:
                if far + length < least.get(other, far + length + 1):
                    least[other] = far + length
                    heapq.heappush(heap, (far + length, other))
    return sum(least.values())


def _tables(seed: int) -> int:
    """Min-plus products of 1,500 small matrices of whole numbers, in numpy."""
    tables = np.array(_numbers(seed, 1500 * 64), dtype=np.int64).reshape(1500, 8, 8) % 1000
    total = tables[0]
    for table in tables[1:]:
        total = (total[:, :, None] + table[None]).min(axis=1)
        total = total - total.min()
    return int(total.sum())


def _texts(seed: int) -> int:
    """Records written as JSON and read again."""
    records = [{"name": f"w{n}", "shape": [n % 64, n % 512], "cost": n % 977} for n in _numbers(seed, 6000)]
    again = json.loads(json.dumps(records, sort_keys=True))
    return sum(len(r["name"]) + r["shape"][1] * r["cost"] for r in sorted(again, key=lambda r: (r["cost"], r["name"])))


def run(quick: bool, say: Say) -> Report:
    """The benchmark; ``quick`` does a part of the work."""
    size = 1 if quick else SIZE
    found_s = seconds(size)
    return Report("reference", "", ({"work": f"size {size}", "reference_cpu_s": found_s},), True)
