"""The real suites: fetch weights and data, fine-tune experts, merge them, evaluate. See `python -m benchmarks.suites -h`."""
