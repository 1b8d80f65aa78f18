"""What `accelerate` needs to know of a layer that it puts in place of one of transformers."""

from __future__ import annotations

from contextvars import ContextVar

from torch import nn
from transformers import PreTrainedModel

# Whether a forward pass of an accelerated trunk is running, in this thread.
ACCELERATED: ContextVar[bool] = ContextVar("ACCELERATED", default=False)


class FusedLayer:
    """A layer on this package's attention. Its last base is the layer of transformers.

    trunk is the model that creates the mask of the layer.
    """

    trunk: type[PreTrainedModel]

    # Whether nothing is computed for padding if the trunk is an encoder.
    removes_padding = False

    def prepare(self) -> None:
        """Adds what the forward pass needs."""

    def restore(self) -> None:
        """Undoes `prepare`."""

    @staticmethod
    def refusal(layer: nn.Module) -> str | None:
        """Why a layer of transformers cannot be replaced."""
        return None
