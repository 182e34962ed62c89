"""Compare the runs of a sweep again: python -m common.compare FOLDER."""

from common.report.compare import main

if __name__ == "__main__":
    main()
