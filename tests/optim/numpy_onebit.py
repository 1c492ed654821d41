"""1-bit Adam and LAMB of n workers in NumPy, by definition, for a few leaves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Leaves = dict[str, np.ndarray]


def sign(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1.0, -1.0)


class NumpyOneBitAdam:
    """Its state is float64; a leaf's element i is in chunk i mod n."""

    def __init__(self, params: Leaves, workers: int, freeze_step: int, **rates: Any):
        self.clip_norm = rates.pop("clip_norm", np.inf)
        self.params = {name: x.astype(np.float64) for name, x in params.items()}
        self.n, self.freeze, self.step_number = workers, freeze_step, 0
        self.rates = {"lr": 1e-2, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "wd": 0} | rates
        zeros = lambda: {n: np.zeros_like(x) for n, x in self.params.items()}  # noqa: E731
        self.mu, self.nu, self.masked = zeros(), zeros(), {}
        self.worker = {n: np.zeros((workers, x.size)) for n, x in self.params.items()}
        self.server = {n: np.zeros(x.size) for n, x in self.params.items()}

    def set_errors(self, worker: Leaves, server: Leaves) -> None:
        """Begin a step from another one's errors: `server` by element of the leaf."""
        self.worker = {n: x.astype(np.float64) for n, x in worker.items()}
        self.server = {n: x.astype(np.float64) for n, x in server.items()}

    def step(self, grads: Sequence[Leaves]) -> Leaves:
        """Take a step with each worker's gradient, whose mean is the step's."""
        own, t = self.rates, self.step_number + 1
        self.is_whole = self.step_number < self.freeze
        grads = self._clipped(grads)
        for name, p in self.params.items():
            local = np.stack([g[name].astype(np.float64) for g in grads])
            if self.step_number < self.freeze:
                mean = local.mean(0)
                self.mu[name] = own["b1"] * self.mu[name] + (1 - own["b1"]) * mean
                self.nu[name] = own["b2"] * self.nu[name] + (1 - own["b2"]) * mean**2
            else:
                given = own["b1"] * self.mu[name] + (1 - own["b1"]) * local
                keep = self.masked.setdefault(name, self.mu[name] != 0)
                self.mu[name] = self._compressed(name, given, keep)
            mu = self.mu[name] / (1 - own["b1"] ** t)
            nu = self.nu[name] / (1 - own["b2"] ** min(t, self.freeze))
            update = mu / (np.sqrt(nu) + own["eps"]) + own["wd"] * p
            self.params[name] = p - own["lr"] * update
        self.step_number += 1
        return self.params

    def _clipped(self, grads: Sequence[Leaves]) -> list[Leaves]:
        """By the mean's norm, later by the root mean square of the workers' norms."""
        whole = np.stack(
            [np.concatenate([x.ravel() for x in g.values()]) for g in grads]
        )
        if self.is_whole:
            self.norm = np.linalg.norm(whole.mean(0))
        else:
            self.norm = np.sqrt((whole**2).sum(1).mean())
        factor = min(1.0, self.clip_norm / self.norm)
        return [{name: factor * x for name, x in g.items()} for g in grads]

    def _compressed(self, name: str, given: np.ndarray, keep: np.ndarray) -> np.ndarray:
        shape, size, keep = given.shape[1:], given[0].size, keep.reshape(-1)
        c = np.where(keep, given.reshape(self.n, -1), 0) + self.worker[name]
        scale = np.sqrt((c**2).sum(1, keepdims=True) / size)
        self.worker[name] = np.where(keep, c - scale * sign(c), 0)
        y = np.where(keep, (scale * sign(c)).mean(0) + self.server[name], 0)
        found = np.zeros(size)
        for chunk in range(self.n):
            own = slice(chunk, size, self.n)
            scale = np.sqrt((y[own] ** 2).mean())
            found[own] = scale * sign(y[own])
        self.server[name] = np.where(keep, y - found, 0)
        return np.where(keep, found, 0).reshape(shape)


class NumpyOneBitLamb(NumpyOneBitAdam):
    """Its trust ratios and factors are by leaf, in `coeff` and `last`."""

    def __init__(self, params: Leaves, workers: int, freeze_step: int, **rates: Any):
        super().__init__(params, workers, freeze_step, **({"eps": 1e-6} | rates))
        limits = {"coeff": (0.01, 10), "factor": (0.5, 4), "change": 0.1, "b3": 0.9}
        self.rates = limits | self.rates
        self.fresh = {name: np.zeros_like(x) for name, x in self.params.items()}
        self.coeff = dict.fromkeys(params, 0.0)
        self.last = dict.fromkeys(params, 1.0)

    def step(self, grads: Sequence[Leaves]) -> Leaves:
        """Take a step with each worker's gradient, whose mean is the step's."""
        self.is_whole = self.step_number < self.freeze
        grads = self._clipped(grads)
        for name in self.params:
            local = np.stack([g[name].astype(np.float64) for g in grads])
            old, b1, b2 = self.mu[name], self.rates["b1"], self.rates["b2"]
            if self.step_number < self.freeze:
                grad = local.mean(0)
                self.mu[name] = b1 * old + (1 - b1) * grad
                self.nu[name] = b2 * self.nu[name] + (1 - b2) * grad**2
                self.fresh[name] = self.nu[name].copy()
                self._warm(name)
                continue
            keep = self.masked.setdefault(name, old != 0)
            self.mu[name] = self._compressed(name, b1 * old + (1 - b1) * local, keep)
            grad = (self.mu[name] - b1 * old) / (1 - b1)
            self.fresh[name] = b2 * self.fresh[name] + (1 - b2) * grad**2
            self._frozen(name)
        self.step_number += 1
        return self.params

    def _warm(self, name: str) -> None:
        own, p = self.rates, self.params[name]
        step = self._adam(name) + own["wd"] * p
        ratio, norms = 1.0, (np.linalg.norm(p), np.linalg.norm(step))
        if all(norms):
            ratio = min(max(norms[0] / norms[1], own["coeff"][0]), own["coeff"][1])
            kept = own["b3"] * self.coeff[name]
            self.coeff[name] = kept + (1 - own["b3"]) * ratio
        self.params[name] = p - own["lr"] * ratio * step

    def _frozen(self, name: str) -> None:
        own, p, t = self.rates, self.params[name], self.step_number + 1
        adam = self._adam(name)
        step = adam + own["wd"] * p
        roots = self._root(self.nu[name], self.freeze), self._root(self.fresh[name], t)
        factor, whole = (roots[0] / roots[1]).max(), np.linalg.norm(step)
        share = min(np.linalg.norm(adam) / whole, 1) if whole else 1
        factor = factor * share + 1 - share
        factor = min(max(factor, own["factor"][0]), own["factor"][1])
        factor = min(factor, self.last[name] * (1 + own["change"]))
        self.last[name] = max(factor, self.last[name] * (1 - own["change"]))
        mean = self.coeff[name] / (1 - own["b3"] ** self.freeze)
        self.params[name] = p - own["lr"] * mean * self.last[name] * step

    def _adam(self, name: str) -> np.ndarray:
        t = self.step_number + 1
        root = self._root(self.nu[name], min(t, self.freeze))
        return self.mu[name] / (1 - self.rates["b1"] ** t) / root

    def _root(self, nu: np.ndarray, steps: int) -> np.ndarray:
        return np.sqrt(nu / (1 - self.rates["b2"] ** steps)) + self.rates["eps"]
