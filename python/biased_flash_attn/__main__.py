"""`python -m biased_flash_attn`."""

from .cli import main

main(prog_name="python -m biased_flash_attn")
