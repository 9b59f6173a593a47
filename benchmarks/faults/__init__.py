"""A battery of faults: real programs that are killed, stopped, starved, or given damaged files, and judged by what is
left of them. ``python -m benchmarks.faults``; what is promised is in docs/project/faults.md."""
