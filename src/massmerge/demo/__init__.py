"""What `mass demo` shows: real experts, carried here or made by the vision suite, laid out in a folder to play with."""

from massmerge.demo.folder import Demo, Placed
from massmerge.demo.text import make_text_demo
from massmerge.demo.vision import make_vision_demo

__all__ = ["Demo", "Placed", "make_text_demo", "make_vision_demo"]
