"""Collect every Python block of the pages as a test."""

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["docs/*.md", "docs/**/*.md"]
).pytest()
