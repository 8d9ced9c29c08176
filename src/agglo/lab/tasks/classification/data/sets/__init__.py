"""One file per data set. Each is imported when the names of data sets are first asked for, and registers itself."""
