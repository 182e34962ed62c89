"""Run the command python -m ddp_bench.report."""

from ddp_bench.report import main

if __name__ == "__main__":
    main()
