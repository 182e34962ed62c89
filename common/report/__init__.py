"""What a run shows: metrics, progress, report pages, plots, comparisons and dashboards."""
