"""A backend of Triton's named `cpu`, which vLLM's CPU build asks for before it uses any of its Triton kernels.

Nothing is compiled: with TRITON_INTERPRET=1 Triton runs kernels in Python and numpy, on the memory of CPU tensors, and never
comes to a backend's compiler or launcher. Triton imports this package in every process that imports it, and so in all of vLLM's,
before there is an engine: what else is different on GPUs is arranged here too (`patches.py`).
"""

from vllm_as_on_gpus import patches

patches.register()
