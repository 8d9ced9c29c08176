"""Benchmarks, drawings, and the paper's tables and figures."""
