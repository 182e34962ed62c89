"""The output of a run: metrics, progress, report pages, plots, comparisons and dashboards."""
