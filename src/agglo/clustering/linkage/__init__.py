"""Single, average and complete linkage over all pairs of tokens. `reference.py` is the definition."""
