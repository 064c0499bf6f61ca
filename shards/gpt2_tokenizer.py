"""The program dist_mem/datasets/gpt2_tokenizer.py as a script: python shards/gpt2_tokenizer.py --help."""

import sys

from dist_mem.datasets.gpt2_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
