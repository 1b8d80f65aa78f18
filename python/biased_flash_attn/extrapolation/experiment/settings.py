"""The settings of an experiment: everything that its results depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from ...nn import positions
from ..training.settings import check_lengths, check_schemes, check_seeds, versions
from .objective import OBJECTIVES, Objective

BYTES = 256
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Size:
    """The sizes of a model, of its training, and of its evaluation.

    Training has `steps` of `batch` sequences; the learning rate rises to `rate` and decays to a
    tenth of it. Evaluation predicts the last `scored` tokens of `blocks` windows, or some in their
    middle, and computes gradients of `gradients` windows. Tokens are bytes, or those of a larger
    `vocabulary` of the text.
    """

    layers: int
    dim: int
    heads: int
    steps: int
    batch: int
    rate: float
    blocks: int
    gradients: int
    vocabulary: int = BYTES
    scored: int = 32

    @property
    def unit(self) -> str:
        return "bytes" if self.vocabulary == BYTES else "tokens"


SIZES = {
    # For two CPU cores: 10^7 bytes of training at a length of 128.
    "small": Size(4, 128, 4, 2500, 32, 2e-3, blocks=2048, gradients=64),
    # For a GPU: GPT-tiny of Veisi et al., 2025, with a small vocabulary, and 10^8 tokens of
    # training at a length of 512.
    "large": Size(6, 512, 8, 3052, 64, 6e-4, blocks=2**14, gradients=64, vocabulary=8192),
}


@dataclass(frozen=True)
class Settings:
    """An experiment: models that differ only in their position scheme, several of each.

    train_length: tokens of a training sequence.
    eval_lengths: contexts for evaluation, ascending.
    seeds: each determines parameters and the order of the text, which are the same for all schemes.
    dtype: "bfloat16" (autocast) or "float32".
    device: "cpu", "cuda", ...
    objective: "causal" for models that predict the next token, or "masked" for encoders.
    cache: if given, the number of keys that evaluation keeps, as with a sliding cache.
    """

    schemes: tuple[str, ...]
    train_length: int
    eval_lengths: tuple[int, ...]
    size: Size
    seeds: tuple[int, ...] = (0,)
    dtype: str = "bfloat16"
    device: str = "cpu"
    objective: str = "causal"
    cache: int | None = None

    def __post_init__(self):
        check_schemes(self.schemes, self.size.heads, self.size.dim)
        check_seeds(self.seeds)
        if self.train_length < 1:
            raise ValueError(f"train_length is {self.train_length}; it must be positive")
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f"objective is {self.objective!r}; it may be {' or '.join(OBJECTIVES)}"
            )
        check_lengths(self.eval_lengths, self.prediction.shortest)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it may be {' or '.join(DTYPES)}")
        if self.cache is not None and self.cache < 1:
            raise ValueError(f"cache is {self.cache}; it must be positive")
        if not self.prediction.causal:
            self._check_bidirectional()

    @property
    def trained_tokens(self) -> int:
        """The number of tokens of all steps, which may draw some of the text more than once."""
        return self.size.steps * self.size.batch * self.train_length

    @property
    def prediction(self) -> Objective:
        """What models predict."""
        return OBJECTIVES[self.objective]

    @property
    def scored(self) -> int:
        """The number of tokens of a window among which those are that are predicted."""
        return min(self.size.scored, self.eval_lengths[0] - self.prediction.unscored)

    def _check_bidirectional(self) -> None:
        """Raises ValueError for what only causal models have."""
        windows = [scheme for scheme in self.schemes if positions(scheme).window is not None]
        if windows:
            raise ValueError(
                f"schemes has {windows[0]}; windows need objective 'causal', not 'masked'"
            )
        if self.cache is not None:
            raise ValueError(f"cache is {self.cache}; it needs objective 'causal', not 'masked'")

    def autocast(self) -> torch.autocast:
        kind = torch.device(self.device).type
        return torch.autocast(kind, DTYPES[self.dtype], enabled=self.dtype != "float32")


def identity(settings: Settings, scheme: str, seed: int, digest: str) -> dict[str, object]:
    """The settings that the results of a model depend on, and versions; digest is the text's."""
    values = asdict(settings)
    del values["schemes"], values["seeds"]
    return {
        "scheme": scheme,
        "seed": seed,
        **values,
        "eval_lengths": list(settings.eval_lengths),
        "text": digest,
        **versions(),
    }


def doublings(first: int, last: int) -> Sequence[int]:
    """first, 2 first, 4 first, ..., up to last; first is positive, or ValueError is raised."""
    if first < 1:
        raise ValueError(f"first is {first}; it must be positive")
    lengths = []
    while first <= last:
        lengths.append(first)
        first *= 2
    return lengths
