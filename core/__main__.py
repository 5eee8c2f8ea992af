"""`python -m foredraft`."""

from .cli import main

main()
