"""Codecs: float32 values in fewer bytes, for dense allreduce, strategies and the parameter server.

A codec is a frozen dataclass of settings, in a file of its own: it encodes an array, decodes it again, and can leave in
the array what the code does not express, so that nothing of a sum is lost (*error feedback*). ``codec`` has the
interface; ``plain`` sends float32, ``half`` float16 and bfloat16, ``int8`` and ``int4`` integers with a scale for each
block, ``onebit`` signs, ``ternary`` three values, ``threshold`` the values beyond a threshold, ``topk`` the largest
ones. ``codecs`` has all of them by name.
"""
