"""The program dist_mem/data/builders/gpt2_tokenizer.py as a script: python shards/gpt2_tokenizer.py --help."""

import sys

from dist_mem.data.builders.gpt2_tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
