"""A parameter server for sparse keys and dense ranges of keys. Programs call it ``tr.ps``."""
