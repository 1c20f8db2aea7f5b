"""Policy gradients over per-operator choices (Mirhoseini et al., ICML'17; Williams, 1992)."""

from __future__ import annotations

import numpy as np

from autopar.plan import Plan
from autopar.search.problem import Problem
from autopar.search.research.run import MethodRun, by_method


def reinforce(problem: Problem) -> Plan:
    """Policy gradient placement (Mirhoseini et al., ICML'17) with a softmax for each node.

    Samples are drawn from independent softmax policies. The gradient is that of REINFORCE (Williams, Machine Learning
    1992): mean of (score - baseline) * grad log p, where the baseline is the mean score of the samples, and scores
    are ranks, so that a forbidden choice does not drown the others. Adam's steps; begins from even policies.

    Args:
        problem: what is planned; `Solving.steps` and ``seed`` decide the answer, ``time_limit_s`` is a cap.

    Raises:
        InfeasiblePlanError: no sharding fits the memory limit.
    """
    return by_method(problem, "reinforce", climb)


def climb(run: MethodRun, samples: int = 50, learning_rate: float = 0.1) -> None:
    """Spends the steps of ``run``.

    Args:
        run: the run.
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
