"""`python -m symbiosis` is `symbiosis`."""

from symbiosis.cli import app

app(prog_name="symbiosis")
