"""The version of dist_mem, which every module may read without importing the package's names."""

__version__ = "0.1.0"
