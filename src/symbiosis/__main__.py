"""`python -m symbiosis` is `symbiosis`."""

from symbiosis.cli.main import app

app(prog_name="symbiosis")
