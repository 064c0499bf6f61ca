"""dist_mem: train transformers that remember whole books, on many GPUs.

Words
    document   a book, an article, a dialogue
    segment    T consecutive tokens of one document, the unit of one forward pass
    lane       one row of the global batch; it reads documents one after another
    memory     what a lane carries from one segment to the next (its state)
    STM, LTM   short-term memory (recent hidden states), long-term memory (older, compressed or continuous)
    rank       one process of the job; world: all of them
    shard      one tar file of documents
    epoch      every document exactly once
    cursor     where a lane stands: epoch, place in the plan, token offset

Shape letters, used in every comment and docstring
    B lanes held here    T segment length      M short-term memory length    C compressed memory length
    N basis functions    D model width         H heads                       K head width
    V vocabulary         G global lanes        L layers
"""

__version__ = "0.1.0"
