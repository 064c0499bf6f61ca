"""The command `dist-mem data build cmu_dog` as a script: python shards/build_cmu_dog.py --help."""

import sys

from dist_mem.__main__ import entry

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "build", "cmu_dog"]
    entry()
