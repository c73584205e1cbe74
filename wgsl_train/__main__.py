"""`python -m wgsl_train` is `wgsl-train`."""

from .cli import main

main()
