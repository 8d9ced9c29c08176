"""make bench-clustering; the same as `agglo bench clustering`."""

import argparse

from agglo.study import benchmark_clustering

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=benchmark_clustering.__doc__)
    benchmark_clustering.add_arguments(parser)
    raise SystemExit(benchmark_clustering.run(parser.parse_args()))
