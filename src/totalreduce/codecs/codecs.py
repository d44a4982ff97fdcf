"""All codecs by name. A codec is a file of its own and a line here.

Packages outside add codecs with entry points of the group ``totalreduce.codecs``, programs with ``CODECS.add(name,
make)``.
"""

from __future__ import annotations

from collections.abc import Callable

from totalreduce.codecs.codec import Codec
from totalreduce.codecs.half import Half
from totalreduce.codecs.int4 import Int4
from totalreduce.codecs.int8 import Int8
from totalreduce.codecs.onebit import OneBit
from totalreduce.codecs.plain import Plain
from totalreduce.codecs.ternary import Ternary
from totalreduce.codecs.threshold import Threshold
from totalreduce.codecs.topk import Topk
from totalreduce.foundation.extensions import Extensions, classes_of_settings

__all__ = ["CODECS"]

_Make = Callable[..., Codec]


#: The class of a codec's settings, by the codec's name.
CODECS: Extensions[_Make] = classes_of_settings(
    "codec", "totalreduce.codecs", (Plain, Half, Int8, Int4, OneBit, Ternary, Threshold, Topk)
)
