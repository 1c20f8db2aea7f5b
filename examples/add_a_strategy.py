"""How a researcher adds a search strategy and ranks it: cells for a notebook, or a script."""

# %% [markdown]
# # A strategy of your own
#
# On every logical mesh autopar states which choices there are (how each operator splits), what each costs, and what
# pairs of them cost. A *method* draws choices, scores them and offers what it finds, until its steps are spent. The
# methods that come with autopar do the same, so what you write is ranked with them on the same problems.

# %%
from __future__ import annotations

from typing import Any

import numpy as np

import autopar
from autopar.search import Plan, Problem
from autopar.search.research import MethodRun, Walk, by_method

from . import gpt

# %% [markdown]
# The idea: begin greedily, let every node in turn take what is cheapest given all others, and when nothing improves any
# more shake a few nodes and go on from there. `Walk` prices all strategies of a node from that node's own tables.


# %%
def descend(run: MethodRun) -> None:
    """Iterated local search: descent to a local optimum, then a few random changes to the best one."""
    here = Walk(run.space, run.start)
    while True:
        moved = False
        for node in run.rng.permutation(run.space.sizes.size):
            if not run.more():
                return
            deltas = here.deltas(node)
            strategy = int(np.argmin(deltas))
            if deltas[strategy] < 0 and here.fits(node, strategy):
                here.move(node, strategy, float(deltas[strategy]))
                moved = True
        run.offer(here.choice, here.score)
        if not moved:
            here = Walk(run.space, run.best)
            for node in run.rng.integers(run.space.sizes.size, size=5):
                strategy = int(run.rng.integers(run.space.sizes[node]))
                if here.fits(node, strategy):
                    here.move(node, strategy, float(here.deltas(node)[strategy]))


@autopar.search.register("descent")
def descent(problem: Problem) -> Plan:
    """Iterated local search."""
    return by_method(problem, "descent", descend, steps=20_000)


# %% [markdown]
# From here on it has a name like any other: `autopar.parallelize(step, search="descent")` runs with it, and
# `autopar.compare` and `autopar compare` rank it.


# %%
def ranking(model: Any = gpt, steps: int = 20_000, seeds: tuple[int, ...] = (0, 1, 2)) -> autopar.search.Comparison:
    """The strategy among others, on the train step of a small model and a node of eight A100."""
    step, args = model.build(abstract=True)
    return autopar.compare(
        step,
        *args,
        search=("alpa", "descent", "mcmc", "random", "data-parallel"),
        steps=steps,
        seeds=seeds,
        cluster=autopar.Cluster.load("dgx-a100"),
        mesh_shape=(2, 4),
        num_stages=1,
    )


# %%
if __name__ == "__main__":
    found = ranking()
    print(found)
    for trial in found.trials:
        print(trial.strategy, trial.seed, [(f"{s:.2f} s", f"{cost:.3e} s") for s, cost in trial.curve[-3:]])
