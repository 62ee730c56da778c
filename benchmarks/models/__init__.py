"""Training steps of whole models, with torch's operators and this library's: ``python -m benchmarks.models``."""
