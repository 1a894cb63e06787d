"""Calls of tools: found in what a model says, in the words of its family, or forced by a grammar.

Pure. Everything here is a function of the text so far, however it is cut into pieces, so a stream
says the same as a whole answer, and another gateway the same as this one.
"""

from gateway.tools.parsers import PARSERS, make_parser
from gateway.tools.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning

__all__ = [
    "PARSERS",
    "CallArguments",
    "CallStart",
    "Content",
    "Parser",
    "Part",
    "Reasoning",
    "make_parser",
]
