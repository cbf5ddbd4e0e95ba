"""`python -m limelight` is the command `limelight`."""

from limelight.cli import app

app()
