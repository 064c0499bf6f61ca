"""The command `dist-mem data build text` as a script: python shards/build_text.py --help."""

import sys

from dist_mem.__main__ import entry

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "build", "text"]
    entry()
