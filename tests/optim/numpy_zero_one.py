"""0/1 Adam of n workers in NumPy, as its definition says, for a few leaves."""

from collections.abc import Iterator, Sequence

import numpy as np

from tests.optim.numpy_onebit import Leaves, NumpyOneBitAdam


def rounds(
    freeze: int, var_scaler: int, local_scaler: int, clipper: int
) -> Iterator[str]:
    """What each step exchanges, by counting intervals down."""
    interval, updates = 1, 0
    for step in range(freeze):
        if step % interval:
            yield "signs"
            continue
        yield "whole"
        updates += 1
        if updates == var_scaler:
            interval, updates = 2 * interval, 0
    interval, step = 1, 0
    while True:
        for _ in range(local_scaler):
            step += 1
            yield "alone" if step % interval else "signs"
        interval = min(2 * interval, clipper)


class NumpyZeroOneAdam(NumpyOneBitAdam):
    """Its state is float64; worker i is at ``params - moved[i]``."""

    def __init__(
        self, params: Leaves, workers: int, numbers: Sequence[int], **rates: float
    ):
        super().__init__(params, workers, numbers[0], **rates)
        kinds = rounds(*numbers)
        self.kinds = [next(kinds) for _ in range(200)]
        self.sum_of_rates = 0.0
        self.moved = {n: np.zeros((workers, *x.shape)) for n, x in params.items()}
        self.momenta = {n: np.zeros((workers, *x.shape)) for n, x in params.items()}

    @property
    def updates(self) -> int:
        """Whole gradients so far."""
        return self.kinds[: self.step_number].count("whole")

    def step(self, grads: Sequence[Leaves]) -> Leaves:
        """Take a step with each worker's gradient at its own parameters."""
        kind, own = self.kinds[self.step_number], self.rates
        if self.step_number == self.freeze:
            for errors in (self.worker, self.server):
                for name in errors:
                    errors[name] = np.zeros_like(errors[name])
        alone, t = self.step_number >= self.freeze, self.step_number + 1
        self.is_whole = kind == "whole"
        grads = self._clipped(grads)
        updates = self.updates + (kind == "whole")
        self.sum_of_rates += own["lr"] if alone else 0.0
        for name, p in self.params.items():
            local = np.stack([g[name].astype(np.float64) for g in grads])
            keep = self.nu[name] != 0
            if not alone:
                mean = local.mean(0)
                if kind == "signs":
                    mean = self._compressed(name, local, keep)
                self.mu[name] = own["b1"] * self.mu[name] + (1 - own["b1"]) * mean
                if kind == "whole":
                    learned = (1 - own["b2"]) * mean**2
                    self.nu[name] = own["b2"] * self.nu[name] + learned
                update = (
                    self.mu[name] / (1 - own["b1"] ** t) / self._root(name, updates)
                )
                self.params[name] = p - own["lr"] * (update + own["wd"] * p)
                self.momenta[name][:] = self.mu[name]
                continue
            root = self._root(name, updates)
            momenta = own["b1"] * self.momenta[name] + (1 - own["b1"]) * local
            step = own["lr"] * momenta / (1 - own["b1"] ** t) / root
            self.moved[name] += np.where(keep, step, 0)
            self.momenta[name] = momenta
            if kind == "signs":
                found = self._compressed(name, self.moved[name] * root, keep)
                decay = self.sum_of_rates * own["wd"] * p
                self.params[name] = p - found / root - decay
                self.mu[name] = (1 - own["b1"] ** t) * found / self.sum_of_rates
                self.momenta[name][:] = self.mu[name]
                self.moved[name][:] = 0
        if alone and kind == "signs":
            self.sum_of_rates = 0.0
        self.step_number += 1
        return self.params

    def _root(self, name: str, updates: int) -> np.ndarray:
        unbiased = self.nu[name] / (1 - self.rates["b2"] ** updates)
        return np.sqrt(unbiased) + self.rates["eps"]
