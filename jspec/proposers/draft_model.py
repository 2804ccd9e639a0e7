"""An independent, smaller model of the same vocabulary that drafts token by token, or all at once.

It reads tokens alone: the first pass runs the accepted tokens and the next one at their own
positions. A model that was trained for it (PARD) drafts in that pass, from mask tokens after the
next one. Source: vLLM v1/spec_decode/draft_model.py; arXiv 2211.17192, 2504.18583 (PARD).
"""

from dataclasses import dataclass
from functools import partial

from jspec._checks import check_at_least
from jspec.models import llama, weights
from jspec.models.config import ModelConfig
from jspec.models.kv_cache import KVCache
from jspec.models.llama import Llama
from jspec.proposers import _draft
from jspec.proposers._config import DraftingConfig
from jspec.proposers._draft import DraftModel
from jspec.proposers.base import Proposer, Reads, init_pages, init_params, refuse_axes
from jspec.proposers.loaders import draft_model as loader
from jspec.state import Batch, Drafts, Params


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(DraftingConfig):
    """Chooses the model that drafts.

    Attributes:
      model: its shape; its vocabulary is the target's.
      parallel_drafting: drafts all tokens in one pass, from mask tokens.
      mask_token: id of a mask token; goes with `parallel_drafting`.

    Raises:
      ValueError: as DraftingConfig; the mask token is missing, is not one of the vocabulary, or has
        no use.
    """

    model: ModelConfig
    parallel_drafting: bool = False
    mask_token: int | None = None

    def __post_init__(self):
        super().__post_init__()
        refuse_axes("draft_model", self.model)
        if not self.parallel_drafting:
            if self.mask_token is not None:
                raise ValueError(
                    f"DraftModelConfig: `mask_token` is {self.mask_token}, which has no effect one "
                    "token after the other. Leave it out, or pass parallel_drafting=True."
                )
            return
        if self.mask_token is None:
            raise ValueError(
                "DraftModelConfig: `mask_token` is None, and parallel_drafting needs the id that "
                "the model was trained with. Pass mask_token=, or draft one token after the other."
            )
        check_at_least("DraftModelConfig", 0, mask_token=self.mask_token)
        if self.mask_token >= self.vocab_size:
            raise ValueError(
                f"DraftModelConfig: `mask_token` is {self.mask_token}, wanted an id below the "
                f"vocabulary of {self.vocab_size}: the model has no embedding for it. Take it from "
                "the model's own config.json."
            )

    @classmethod
    def tiny(cls):
        """Returns a config that tests can afford."""
        return cls(num_drafts=3, model=ModelConfig.tiny())


def propose(
    config: DraftModelConfig, params: Params, memory: KVCache, batch: Batch, num_drafts: int
) -> tuple[KVCache, Drafts]:
    """Runs the step's accepted tokens and the next one, then one drafted token at a time.

    In parallel, mask tokens follow the next one in the same pass, and that is all.
    """
    model = weights.bind(Llama, config.model, params)

    def run(token_ids, hidden, view, cache, embeds):
        states, cache = model(token_ids, view, cache, embeds)
        return states["norm"], None, cache

    draft = _draft.in_parallel if config.parallel_drafting else _draft.chain
    return draft(
        DraftModel(
            run=run,
            logits=model.logits,
            vocab_size=config.vocab_size,
            mask_token=config.mask_token or 0,
        ),
        config,
        batch,
        memory,
        num_drafts=num_drafts,
        shift=False,
    )


PROPOSER = Proposer(
    name="draft_model",
    Config=DraftModelConfig,
    init=init_pages,
    propose=propose,
    reads=lambda config: Reads(sampling=config.samples),
    init_params=partial(init_params, Llama),
    recognises=loader.recognises,
    load=partial(loader.load, DraftModelConfig),
    rules=lambda config, names: llama.rules(config.model),
)
