# Where type checkers and editors find kimijax.serve; not shipped. See docs/architecture.md, "Imports".
from serve import *
