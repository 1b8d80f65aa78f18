"""A bias that is lowered to a given form, valid or not."""


class LoweredTo:
    """A custom bias, which is lowered to the given form."""

    def __init__(self, form):
        self.form = form

    def lower(self, geometry, dtype, device):
        return self.form
