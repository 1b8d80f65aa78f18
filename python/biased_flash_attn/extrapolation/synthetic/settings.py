"""The settings of an experiment with synthetic tasks: everything that its results depend on."""

from __future__ import annotations

from dataclasses import dataclass

from ..training.settings import check_lengths, check_schemes, check_seeds, versions
from .markov import Markov
from .tasks import SCORED, Parity, Recall, Task

TASKS: dict[str, Task] = {"markov": Markov(), "recall": Recall(), "parity": Parity()}


@dataclass(frozen=True)
class Size:
    """The sizes of the models, of their training, and of their evaluation.

    Training has `steps` of `batch` documents; the learning rate rises to `rate` and decays to a
    tenth of it. Evaluation has `documents`.
    """

    layers: int = 2
    dim: int = 64
    heads: int = 4
    steps: int = 2000
    batch: int = 64
    rate: float = 3e-3
    documents: int = 256


@dataclass(frozen=True)
class Settings:
    """An experiment: for every scheme and seed a model, which is trained at one length.

    task: "markov", "recall" or "parity".
    seeds: each determines parameters and documents, those for evaluation too. They are the same
        for all schemes.
    eval_lengths: ascending; the first one is that of training.
    """

    task: str
    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    eval_lengths: tuple[int, ...]
    size: Size = Size()
    device: str = "cpu"

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"task is {self.task!r}; it may be {', '.join(TASKS)}")
        check_schemes(self.schemes, self.size.heads, self.size.dim)
        check_seeds(self.seeds)
        task = TASKS[self.task]
        check_lengths(self.eval_lengths, task.shortest)
        least = self.eval_lengths[0] + SCORED
        if task.optimum_improves and any(n < least for n in self.eval_lengths[1:]):
            raise ValueError(
                f"eval_lengths is {self.eval_lengths}; the second must be {least} or more"
            )

    @property
    def train_length(self) -> int:
        return self.eval_lengths[0]

    def identity(self, scheme: str, seed: int) -> dict[str, object]:
        """The settings that the results of a scheme and a seed depend on, and versions."""
        return {
            "task": self.task,
            "scheme": scheme,
            "seed": seed,
            "eval_lengths": list(self.eval_lengths),
            "size": vars(self.size),
            "device": self.device,
            **versions(),
        }
