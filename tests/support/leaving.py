"""A script that ends itself, as one does whose arguments are wrong."""

import sys

sys.exit(3)
