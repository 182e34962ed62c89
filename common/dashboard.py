"""Make the W&B dashboard: python -m common.dashboard PROJECT."""

from common.report.dashboard import main

if __name__ == "__main__":
    main()
