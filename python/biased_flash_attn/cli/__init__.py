"""The commands of `python -m biased_flash_attn`."""

import click

from .check import check
from .compile import compile_kernels
from .demo import demo
from .extrapolate import extrapolate
from .info import info
from .plot import plot
from .predict import predict
from .published import published
from .reproduce import reproduce
from .synthetic import synthetic
from .theory import theory


@click.group()
def main():
    """Fast exact attention with relative-position biases."""


main.add_command(check)
main.add_command(compile_kernels)
main.add_command(demo)
main.add_command(extrapolate)
main.add_command(info)
main.add_command(plot)
main.add_command(predict)
main.add_command(published)
main.add_command(reproduce)
main.add_command(synthetic)
main.add_command(theory)
