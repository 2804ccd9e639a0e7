"""jspec's drafters for PyTorch runners, with the signatures of vLLM's.

The only package of the project that imports torch; vLLM is not needed. See docs/pytorch.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_bridge import ops
    from torch_bridge.interop import dlpack
    from torch_bridge.proposers.extract_hidden import ExtractHiddenStatesProposer
    from torch_bridge.proposers.llm import DFlashProposer, DraftModelProposer, EagleProposer
    from torch_bridge.proposers.medusa import MedusaProposer
    from torch_bridge.proposers.ngram import NgramProposer, NgramProposerGPU
    from torch_bridge.proposers.suffix import SuffixDecodingProposer

__all__ = [
    "DFlashProposer",
    "DraftModelProposer",
    "EagleProposer",
    "ExtractHiddenStatesProposer",
    "MedusaProposer",
    "NgramProposer",
    "NgramProposerGPU",
    "SuffixDecodingProposer",
    "dlpack",
    "ops",
]

_MODULES = {
    "proposers.extract_hidden": ("ExtractHiddenStatesProposer",),
    "proposers.llm": ("DFlashProposer", "DraftModelProposer", "EagleProposer"),
    "proposers.medusa": ("MedusaProposer",),
    "proposers.ngram": ("NgramProposer", "NgramProposerGPU"),
    "proposers.suffix": ("SuffixDecodingProposer",),
    "interop.dlpack": (),
    "ops": (),
}


def __getattr__(name: str) -> Any:
    """Imports a name when it is used: vLLM loads the plug-in in every process."""
    if name not in __all__:
        raise AttributeError(f"module 'torch_bridge' has no attribute {name!r}")
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            "torch_bridge: PyTorch is not installed. Install it once, for example with "
            'pip install "jspec-decode[torch]".'
        ) from error
    for path, names in _MODULES.items():
        if name in names or name == path.split(".")[-1]:
            module = importlib.import_module(f"torch_bridge.{path}")
            return getattr(module, name) if names else module
