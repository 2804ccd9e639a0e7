"""Speculative decoding's drafting side for JAX.

state = jspec.init(config, params, cache=cache, max_requests=64)
state = jspec.admit(state, slot, prompt_tokens)
state, drafts = jspec.step(state, scheduled, verified)
state = jspec.release(state, slot)
"""

from jspec.api import admit, init, prepare, propose, pure, release, step, warmup
from jspec.axes import PAD_SLOT, PAD_TOKEN
from jspec.config import Buckets, CacheConfig
from jspec.loading import load
from jspec.metadata import (
    PADDING_SLOT_ID,
    SpecDecodeMetadata,
    compute_new_slot_mapping,
    extend_all_queries_by_N,
    next_power_of_2,
    update_num_computed_tokens_for_batch_change,
)
from jspec.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats
from jspec.models.config import ModelConfig
from jspec.proposers import REGISTRY
from jspec.proposers.base import Drafter, Proposer
from jspec.proposers.dflash import DFlashConfig
from jspec.proposers.draft_model import DraftModelConfig
from jspec.proposers.eagle import EagleConfig
from jspec.proposers.eagle3 import Eagle3Config
from jspec.proposers.extract_hidden import ExtractHiddenStatesConfig
from jspec.proposers.medusa import MedusaConfig
from jspec.proposers.mtp import MTPConfig
from jspec.proposers.ngram import NgramConfig
from jspec.proposers.ngram_gpu import NgramGPUConfig
from jspec.proposers.suffix import SuffixConfig
from jspec.runtime.decode import generate, generate_plain
from jspec.runtime.policies import Adaptive, BatchSizeSchedule
from jspec.saving import restore, save
from jspec.state import Batch, Drafts, PagedView, Scheduled, State, Verified
from jspec.suffix import SuffixDecodingCache
from jspec.tree import DynamicTree, Tree

__all__ = [
    "Adaptive",
    "Batch",
    "BatchSizeSchedule",
    "Buckets",
    "CacheConfig",
    "DFlashConfig",
    "DraftModelConfig",
    "Drafter",
    "Drafts",
    "DynamicTree",
    "Eagle3Config",
    "EagleConfig",
    "ExtractHiddenStatesConfig",
    "MTPConfig",
    "MedusaConfig",
    "ModelConfig",
    "NgramConfig",
    "NgramGPUConfig",
    "PADDING_SLOT_ID",
    "PAD_SLOT",
    "PAD_TOKEN",
    "PagedView",
    "Proposer",
    "REGISTRY",
    "Scheduled",
    "SpecDecodeMetadata",
    "SpecDecodingLogging",
    "SpecDecodingProm",
    "SpecDecodingStats",
    "State",
    "SuffixConfig",
    "SuffixDecodingCache",
    "Tree",
    "Verified",
    "admit",
    "compute_new_slot_mapping",
    "extend_all_queries_by_N",
    "generate",
    "generate_plain",
    "init",
    "load",
    "next_power_of_2",
    "prepare",
    "propose",
    "pure",
    "release",
    "restore",
    "save",
    "step",
    "update_num_computed_tokens_for_batch_change",
    "warmup",
]
