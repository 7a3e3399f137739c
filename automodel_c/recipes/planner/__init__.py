"""What a recipe would take on so many GPUs, predicted from measured constants: memory, time, the mesh to choose."""

from .job import Job
from .machine import Machine
from .memory import memory
from .report import explain
from .timing import timing

__all__ = ["Job", "Machine", "explain", "memory", "timing"]
