"""What a recipe would take on so many GPUs, predicted from measured constants: memory, time, and which mesh to choose."""

from .job import Job
from .machine import Machine
from .memory import memory
from .timing import timing

__all__ = ["Job", "Machine", "memory", "timing"]
