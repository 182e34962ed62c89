"""Compare the runs of a sweep again: python -m common.compare FOLDER."""

import sys

from common.report.compare import main

if __name__ == "__main__":
    sys.exit(main())
