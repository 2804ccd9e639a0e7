"""EAGLE-1 and EAGLE-2 heads: the target's next hidden state, drafted token by token.

The head pairs token i + 1 with the target's hidden state at i, and goes on from its own output.
Source: arXiv 2401.15077 (EAGLE), 2406.16858 (EAGLE-2, the same weights); vLLM
v1/spec_decode/eagle.py.
"""

from dataclasses import dataclass
from functools import partial

from jspec.models import weights
from jspec.models.eagle import Eagle, EagleModelConfig
from jspec.models.kv_cache import KVCache
from jspec.proposers import _draft
from jspec.proposers._config import TreeDraftingConfig, check_width
from jspec.proposers._draft import DraftModel
from jspec.proposers._tree import draft_tree
from jspec.proposers.base import Proposer, Reads, init_pages, init_params, refuse_axes
from jspec.proposers.loaders import eagle as loader
from jspec.state import Batch, Drafts, Params


@dataclass(frozen=True, kw_only=True)
class EagleConfig(TreeDraftingConfig):
    """Chooses the head that drafts, and whether it drafts a chain or a tree.

    Attributes:
      model: its shape; vocabulary and width are the target's.

    Raises:
      ValueError: as `TreeDraftingConfig`; the tree wants more candidates than there are tokens.
      NotImplementedError: a tree for positions of three axes (M-RoPE).
    """

    model: EagleModelConfig

    def __post_init__(self):
        super().__post_init__()
        check_width("EagleConfig", self.tree, self.vocab_size)
        if self.tree is not None:
            refuse_axes("eagle with a tree", self.model)

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=EagleModelConfig.tiny(fc_bias=True))


def draft_model(config: EagleConfig, params: Params) -> DraftModel:
    """Binds the head to its weights, as the draft loop calls it."""
    head = weights.bind(Eagle, config.model, params)
    return DraftModel(run=head, logits=head.logits, vocab_size=config.vocab_size)


def propose(
    config: EagleConfig, params: Params, memory: KVCache, batch: Batch, num_drafts: int
) -> tuple[KVCache, Drafts]:
    """Runs the step's rows with their hidden states, then one drafted token or level at a time."""
    draft = _draft.chain if config.tree is None else draft_tree
    return draft(
        draft_model(config, params),
        config,
        batch,
        memory,
        num_drafts=num_drafts,
        shift=True,
    )


PROPOSER = Proposer(
    name="eagle",
    Config=EagleConfig,
    init=init_pages,
    propose=propose,
    reads=lambda config: Reads(
        hidden_layers=("norm",),
        hidden_size=config.decoder.hidden_size,
        sampling=config.samples,
        embeds_size=config.decoder.hidden_size,
    ),
    tree=lambda config: config.tree,
    init_params=partial(init_params, Eagle),
    recognises=loader.recognises,
    load=partial(loader.load, EagleConfig),
    rules=loader.rules,
)
