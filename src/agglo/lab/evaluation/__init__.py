"""Evaluations that every task shares: the cells of a grid, a record that survives a crash, speeds, tables and plots."""
