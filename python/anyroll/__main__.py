"""`python -m anyroll`: the command line, with this interpreter's torch."""

from anyroll._programs import main

main()
