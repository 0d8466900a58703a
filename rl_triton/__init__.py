"""Credit assignment for reinforcement learning as Triton kernels."""

__version__ = "0.1.0.dev0"
