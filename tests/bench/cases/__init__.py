"""Programs, models and processes that several benchmarks share. Nothing here is a benchmark of its own."""
