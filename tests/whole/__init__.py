"""Programs that run whole: examples, benchmarks, the battery of faults. ``make test-programs``."""
