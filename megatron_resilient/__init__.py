"""megatron_resilient: resilient, elastic and fast Mixture-of-Experts training on Megatron-Core.

Importing this package imports neither torch nor Megatron and patches nothing.
"""

__version__ = "0.1.0"
