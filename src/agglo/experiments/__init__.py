"""What every task needs: models and checkpoints, variants, records, run folders, progress, tables."""
