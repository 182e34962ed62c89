"""The device of a rank: presets, precision, threads, the profiler."""
