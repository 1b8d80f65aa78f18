"""Models of transformers on this package's attention, through `accelerate` or by name.

Importing it registers `NAME` with transformers, for `attn_implementation=NAME` in models whose
attention layers select an implementation by name. Raises ImportError unless transformers is 5.24 or
newer.
"""

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "transformers is missing: pip install 'biased-flash-attn[transformers]'"
    ) from error

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
    raise ImportError(
        f"transformers is {transformers.__version__}; it must be 5.24 or newer:"
        " pip install 'biased-flash-attn[transformers]'"
    )

from .acceleration import accelerate, unaccelerate
from .interface import NAME, register

register()

__all__ = ["NAME", "accelerate", "unaccelerate"]
