"""SOAP by its definition, in NumPy at double precision: one matrix [m, n] at a time."""

import jax
import numpy as np

LEAST = 1e-4


class NumpySoap:
    """Updates of a matrix, or of a vector, which has plain Adam."""

    def __init__(self, shape, *, b1, b2, beta, eps, every, sides=(0, 1)):
        self.betas, self.eps, self.every = (b1, b2, beta), eps, every
        self.sides = sides if len(shape) == 2 else ()
        self.mu, self.nu = np.zeros(shape), np.zeros(shape)
        self.mean = {side: np.zeros((shape[side],) * 2) for side in self.sides}
        self.basis = {side: np.eye(shape[side]) for side in self.sides}
        self.step = 0

    def turn(self, x, back=False):
        for side, q in self.basis.items():
            q = q.T if back else q
            x = q.T @ x if side == 0 else x @ q
        return x

    def update(self, grad):
        b1, b2, beta = self.betas
        update = np.zeros_like(grad)
        if self.step:
            self.mu = b1 * self.mu + (1 - b1) * grad
            self.nu = b2 * self.nu + (1 - b2) * self.turn(grad) ** 2
            mean, square = self.mu / (1 - b1**self.step), self.nu / (1 - b2**self.step)
            update = self.turn(self.turn(mean) / (np.sqrt(square) + self.eps), True)
        for side in self.sides:
            product = grad @ grad.T if side == 0 else grad.T @ grad
            mean = self.mean[side] = beta * self.mean[side] + (1 - beta) * product
            if self.step == 0:
                self.basis[side] = eigenvectors(mean)
            elif self.step % self.every == 0:
                q = self.basis[side]
                largest = np.diag(q.T @ mean @ q).max()
                shifted = mean + LEAST * largest * np.eye(len(mean))
                self.basis[side] = np.linalg.qr(shifted @ q).Q
        self.step += 1
        return update


def eigenvectors(mean):
    """Largest first; of the null space any that are orthogonal, but fixed ones."""
    values, vectors = np.linalg.eigh(mean)
    values, vectors = values[::-1], vectors[:, ::-1]
    fixed = np.asarray(jax.random.normal(jax.random.key(0), mean.shape))
    return np.linalg.qr(np.where(values > LEAST * values[0], vectors, fixed)).Q
