"""jspec's drafters for PyTorch runners, called as vLLM's own are.

The only package of the project that imports torch; vLLM it never needs. See docs/pytorch.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_bridge import dlpack, ops
    from torch_bridge.extract_hidden import ExtractHiddenStatesProposer
    from torch_bridge.llm import DFlashProposer, DraftModelProposer, EagleProposer
    from torch_bridge.medusa import MedusaProposer
    from torch_bridge.ngram import NgramProposer, NgramProposerGPU
    from torch_bridge.suffix import SuffixDecodingProposer

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
    "DFlashProposer": "llm",
    "DraftModelProposer": "llm",
    "EagleProposer": "llm",
    "ExtractHiddenStatesProposer": "extract_hidden",
    "MedusaProposer": "medusa",
    "NgramProposer": "ngram",
    "NgramProposerGPU": "ngram",
    "SuffixDecodingProposer": "suffix",
}


def __getattr__(name: str) -> Any:
    """Imports what is asked for: vLLM loads the plug-in in every process, used or not."""
    if name not in __all__:
        raise AttributeError(f"module 'torch_bridge' has no attribute {name!r}")
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(
            "torch_bridge: PyTorch is not installed. Install it once, for example with "
            'pip install "jspec-decode[torch]".'
        ) from error
    module = importlib.import_module(f"torch_bridge.{_MODULES.get(name, name)}")
    return getattr(module, name) if name in _MODULES else module
