"""The way into jspec for PyTorch runners. The only package of the project that may import torch.

It holds no public name yet: until the proposer classes land, call jspec and convert with DLPack.
"""

__all__: list[str] = []
