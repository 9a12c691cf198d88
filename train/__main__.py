"""`python -m kimijax.train`: see `cli`."""

import sys

from .cli import main

sys.exit(main())
