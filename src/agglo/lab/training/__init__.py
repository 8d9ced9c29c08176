"""Training that every task shares: batches, rates, and a loop that a kill does not change."""
