"""The program dist_mem/datasets/sorting_baselines.py as a script: python shards/sorting_baselines.py --help."""

import sys

from dist_mem.datasets.sorting_baselines import main

if __name__ == "__main__":
    sys.exit(main())
