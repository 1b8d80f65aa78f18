"""The extrapolation laboratory: which biases let a model extrapolate to longer sequences?

Before training, from a bias alone: `convergence`, `compare_receptive_fields`,
`normalized_receptive_field`, `log_fit`, `predict`, `information`, and `bias.receptive_field(eps)`.
`published` has the perplexities of the papers' tables. For a trained model:
`cumulative_gradient` with `empirical_receptive_field`, `attention_masses`, and perplexity by three
protocols. `pictures` draws plots. `synthetic` trains and evaluates small models on tasks whose
optimum is known, and `experiment` on text.
"""

from . import published
from .attention_weights import attention_mass, attention_masses
from .convergence import Convergence, convergence
from .gradients import cumulative_gradient, empirical_receptive_field
from .perplexity import (
    Perplexity,
    last_token_perplexity,
    nonoverlapping_perplexity,
    sliding_perplexity,
)
from .prediction import information, predict
from .receptive_field import (
    FieldOrder,
    compare_receptive_fields,
    log_fit,
    mean_receptive_field,
    normalized_receptive_field,
)

__all__ = [
    "Convergence",
    "FieldOrder",
    "Perplexity",
    "attention_mass",
    "attention_masses",
    "compare_receptive_fields",
    "convergence",
    "cumulative_gradient",
    "empirical_receptive_field",
    "information",
    "last_token_perplexity",
    "log_fit",
    "mean_receptive_field",
    "nonoverlapping_perplexity",
    "normalized_receptive_field",
    "predict",
    "published",
    "sliding_perplexity",
]
