"""Strategies that search by trying choices of one mesh: one method each, a function that spends the steps of a run.

    random         choices drawn at random (Bergstra and Bengio, JMLR 13, 2012): what every search should beat
    exhaustive     all choices, for problems that are small enough: what others are compared with
    mcmc           Metropolis-Hastings over per-operator choices (Jia, Zaharia, Aiken: FlexFlow, MLSys'19, section 6)
    evolutionary   a biased random-key genetic algorithm (Goncalves and Resende, 2011), as REGAL (ICLR'20) uses it
    reinforce      policy gradients over per-operator choices (Mirhoseini et al., ICML'17; Williams, 1992)
    beam           beam search in the order of the operators (Lowerre, 1976; Adams et al., SIGGRAPH'19)

They are registered in `autopar.search.registry`.
"""

from __future__ import annotations

import math
import time

import numpy as np

from autopar.search.research.run import Choices, MethodRun, MethodStrategy, Space, Walk
from autopar.solver import ChoiceProblem, ExhaustiveSolver, Solution, SolverError, objective, reduce_problem
from autopar.solver.problem import Array


def draw(run: MethodRun, draws: int = 64) -> None:
    """The best of choices drawn at random (Bergstra and Bengio, JMLR 2012).

    Where none of them is allowed (memory, or pairs that exclude each other) the answer is the choice that every method
    begins from.

    Args:
        run: whose steps are spent.
        draws: choices that are evaluated at a time.
    """
    block = min(draws, run.steps)
    while run.more(block):
        choices = run.rng.integers(run.space.sizes, size=(block, run.space.sizes.size))
        scores = run.space.scores(choices)
        best = int(scores.argmin())
        run.offer(choices[best], float(scores[best]))


def enumerate_all(run: MethodRun) -> None:
    """Tries all choices of small problems, and refuses others.

    Reductions that leave the optimum as it is (`autopar.solver.presolve`: partitioned boolean quadratic programs,
    Scholz and Eckstein, LCTES'02) go first, where the problem is too large without them.

    Args:
        run: its steps are the largest number of choices.

    Raises:
        SolverError: there are more choices than that; it has their number.
    """
    problem, most = run.space.problem, run.steps
    solver = ExhaustiveSolver(most)
    if problem.combinations <= most:
        answer = _solved(solver, problem, run.deadline)
        choice, bound = answer.choice, answer.lower_bound
    else:
        reduction = reduce_problem(problem)
        left = reduction.problem
        assert left is not None, "the start is allowed"
        if left.combinations > most:
            raise SolverError(
                f"exhaustive search takes {most:,} choices; this problem has {_size(problem.combinations)} of "
                f"{len(problem.nodes)} nodes, and after reductions {_size(left.combinations)} of {len(left.nodes)}",
                cause="the number of choices is the product of the strategies of all nodes",
                remedy="search='alpa', which proves the optimum, a mesh of one axis, or a smaller function",
            )
        answer = _solved(solver, left, run.deadline)
        # Where reductions leave nothing to choose, the choice is empty and still an answer.
        complete = len(answer.choice) == len(left.nodes)
        choice, bound = reduction.lift(answer.choice) if complete else (), answer.lower_bound + reduction.offset
    run.more(min(most, problem.combinations))
    if choice:
        cost = objective(problem, choice)
        run.offer(choice, cost)
        run.bound = min(bound, cost)


def _solved(solver: ExhaustiveSolver, problem: ChoiceProblem, deadline: float) -> Solution:
    left = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
    return solver.solve(problem, time_limit_s=left)


def _size(combinations: int) -> str:
    """A number of choices as text: ``1,234,567``, or ``10^62``."""
    return f"{combinations:,}" if combinations < 10**12 else f"10^{len(str(combinations)) - 1}"


def walk(run: MethodRun, hot: float = 1e-2, cold: float = 1e-5, patience: float = 0.1) -> None:
    """Metropolis-Hastings over per-operator choices (FlexFlow, Jia et al., MLSys'19).

    A step draws a node and one of its other strategies, prices the change by that node's own tables (FlexFlow's delta
    simulation) and takes it with probability min(1, exp(-beta * change)); beta rises from 1% to 0.001% of the cost
    of the start. The walk goes back to the best choice after a tenth of the steps without a better one.

    Args:
        run: whose steps are spent.
        hot: rise of the cost, as a share of it, that is accepted with probability 1/e at first.
        cold: likewise at the end.
        patience: share of the steps without a better choice after which the walk returns to the best.
    """
    space = run.space
    free = np.flatnonzero(space.sizes > 1)
    here = Walk(space, run.start)
    run.offer(here.choice, here.score)
    if not free.size:
        return
    first = max(here.score, 1e-300)
    since = 0
    while run.more():
        node = int(free[int(run.rng.integers(free.size))])
        strategy = int(run.rng.integers(space.sizes[node] - 1))
        strategy += strategy >= here.choice[node]  # one of the others
        delta = float(here.deltas(node)[strategy])
        heat = first * hot * (cold / hot) ** (run.spent / run.steps)
        taken = delta <= 0 or float(run.rng.random()) < math.exp(-min(delta / heat, 700.0))
        if taken and here.fits(node, strategy):
            here.move(node, strategy, delta)
        since += 1
        if here.score < run.cost * (1 - 1e-12):
            run.offer(here.choice, here.score)
            since = 0
        elif since > patience * run.steps:
            here, since = Walk(space, run.best), 0


def evolve(
    run: MethodRun, population: int = 100, elite_share: float = 0.15, mutant_share: float = 0.1, elite_bias: float = 0.7
) -> None:
    """Biased random-key genetic algorithm (Goncalves and Resende, J. Heuristics 2011; REGAL, ICLR'20).

    An individual has a strategy for each node. In every generation the elite stays, new mutants are drawn, and each
    other child takes every gene from an elite parent with probability 0.7, else from a parent of the rest. The first
    generation has the choice that every method begins from.

    Args:
        run: whose steps are spent.
        population: individuals.
        elite_share: share of them that stays.
        mutant_share: share of them that is drawn in each generation.
        elite_bias: probability that a gene comes from the elite parent.
    """
    space, rng = run.space, run.rng
    nodes = space.sizes.size
    count = max(4, min(population, run.steps // 4))
    elite, mutants = max(1, int(elite_share * count)), max(1, int(mutant_share * count))
    people = rng.integers(space.sizes, size=(count, nodes))
    people[0] = run.start
    while run.more(count):
        scores = space.scores(people)
        order = np.argsort(scores, kind="stable")
        run.offer(people[order[0]], float(scores[order[0]]))
        best, rest = people[order[:elite]], people[order[elite:]]
        children = count - elite - mutants
        mothers = best[rng.integers(len(best), size=children)]
        fathers = rest[rng.integers(len(rest), size=children)]
        born = np.where(rng.random((children, nodes)) < elite_bias, mothers, fathers)
        people = np.concatenate([best, born, rng.integers(space.sizes, size=(mutants, nodes))])


def climb(run: MethodRun, samples: int = 50, learning_rate: float = 0.1) -> None:
    """Policy gradient placement (Mirhoseini et al., ICML'17) with a softmax for each node.

    Samples are drawn from independent softmax policies. The gradient is that of REINFORCE (Williams, Machine Learning
    1992): mean of (score - baseline) * grad log p, where the baseline is the mean score of the samples, and scores
    are ranks, so that a forbidden choice does not drown the others. Adam's steps; begins from even policies.

    Args:
        run: whose steps are spent.
        samples: choices a step.
        learning_rate: length of a step.
    """
    space, rng = run.space, run.rng
    decay, scale_decay, least_scale = 0.9, 0.999, 1e-8  # Adam's (Kingma and Ba, 2015)
    most = int(space.sizes.max(initial=1))
    there = np.arange(most)[None, :] < space.sizes[:, None]
    logits = np.where(there, 0.0, -np.inf)
    speed, scale = np.zeros_like(logits), np.zeros_like(logits)
    count = max(2, min(samples, run.steps))
    advantage = np.linspace(1.0, -1.0, count)  # of the best sample, the next..: its mean, the baseline, is 0
    round = 0
    while run.more(count):
        round += 1
        policy = np.exp(logits - logits.max(axis=1, keepdims=True))
        policy /= policy.sum(axis=1, keepdims=True)
        drawn = rng.random((count, space.sizes.size, 1)) > np.cumsum(policy, axis=1)[None]
        choices = np.minimum(drawn.sum(axis=2), space.sizes - 1)
        scores = space.scores(choices)
        order = np.argsort(scores, kind="stable")
        run.offer(choices[order[0]], float(scores[order[0]]))
        gradient = np.zeros_like(logits)
        nodes = np.arange(space.sizes.size)
        for sample, gain in zip(order, advantage, strict=True):
            gradient[nodes, choices[sample]] += gain / count
        gradient -= policy * gradient.sum(axis=1, keepdims=True)
        speed = decay * speed + (1 - decay) * gradient
        scale = scale_decay * scale + (1 - scale_decay) * gradient**2
        step = speed / (1 - decay**round) / (np.sqrt(scale / (1 - scale_decay**round)) + least_scale)
        logits = np.where(there, logits + learning_rate * step, -np.inf)


def search(run: MethodRun) -> None:
    """Beam search in operator order (Lowerre, 1976; as Adams et al., SIGGRAPH'19, search schedules).

    Nodes are decided one after the other, inputs right before their first reader. The beam keeps the partial choices
    with the least cost so far, to which the least that their open pairs can cost is added; its width is what the steps
    allow. With a memory limit those are dropped that exceed it even if all open nodes hold their least.

    Args:
        run: whose steps are spent; partial choices count like whole ones.
    """
    space = run.space
    width = max(1, run.steps // max(1, int(space.sizes.sum())))
    states: Choices = np.zeros((1, space.sizes.size), dtype=np.int64)
    scores, held = np.zeros(1), least_held(space)[None, :]
    placed = np.zeros(space.sizes.size, dtype=bool)
    for v in operator_order(space):
        size = int(space.sizes[v])
        if not run.more(len(states) * size):
            break
        total = scores[:, None] + _added(space, v, states, placed)
        keep = np.argsort(total, axis=None, kind="stable")
        if space.usages:
            after = _held_after(space, v, held)
            fits = after.max(axis=2, initial=0.0) <= space.limit_bytes
            keep = keep[fits.ravel()[keep]]
        keep = keep[:width]
        if not keep.size:
            return
        states = states[keep // size]
        states[:, v] = keep % size
        scores = total.ravel()[keep]
        if space.usages:
            held = after.reshape(-1, held.shape[1])[keep]
        placed[v] = True
    if placed.all():
        final = space.scores(states)
        run.offer(states[int(final.argmin())], float(final.min()))


def operator_order(space: Space) -> list[int]:
    """Nodes in order, but for those without a neighbour before them, which come right before their first neighbour."""
    order: dict[int, None] = {}
    before = [sorted(u for u, _ in around if u < v) for v, around in enumerate(space.around)]
    for v, earlier in enumerate(before):
        if earlier:
            order.update(dict.fromkeys(earlier))
            order[v] = None
    order.update(dict.fromkeys(range(len(before))))
    return list(order)


def _added(space: Space, v: int, states: Choices, placed: np.ndarray) -> Array:
    """Term that each strategy of ``v`` adds to the score of each state [states, strategies]."""
    total = np.repeat(space.node_costs[v][None, :], len(states), axis=0)
    for u, rows in space.around[v]:
        if placed[u]:
            # The least over v's strategies was in the score since u was placed.
            total += (rows - rows.min(axis=1, keepdims=True))[states[:, u]]
        else:
            total += rows.min(axis=0)[None, :]
    return total


def least_held(space: Space) -> Array:
    """Bytes at every time if each node held the least that it can."""
    held = np.zeros(space.num_times)
    for u, start, stop in zip(space.usages, space.starts, space.stops, strict=True):
        held[start:stop] += u.bytes.min()
    return held


def _held_after(space: Space, v: int, held: Array) -> Array:
    """Bytes at every time with each strategy of ``v`` [states, strategies, times]."""
    after = np.repeat(held[:, None, :], int(space.sizes[v]), axis=1)
    for start, stop, nbytes in space.usages_of[v]:
        after[:, :, start:stop] += (nbytes - nbytes.min())[None, :, None]
    return after


random = MethodStrategy("random", draw)
exhaustive = MethodStrategy("exhaustive", enumerate_all, 4_000_000)  # a million take a second
mcmc = MethodStrategy("mcmc", walk)
evolutionary = MethodStrategy("evolutionary", evolve)
reinforce = MethodStrategy("reinforce", climb)
beam = MethodStrategy("beam", search)
