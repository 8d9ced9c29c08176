"""The tables and figures of the ATC paper as items: what each needs, how it is run, measured and printed numbers."""
