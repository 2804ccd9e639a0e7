"""A vocabulary that is split over devices, padded or not: the same tokens on every one of them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import CacheConfig, ModelConfig, state
from jspec.models import llama
from jspec.models.medusa import HeadsConfig
from tests.conftest import ROOT
from tests.support.padded_tables import padded_config, padded_params

_SCRIPT = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jspec import CacheConfig, DraftModelConfig, prepare
from jspec.models import llama
from jspec.models.layers import head_logits
from jspec.proposers._config import DraftingConfig
from jspec.proposers import _draft, draft_model
from jspec.proposers._draft import Vocabulary
from tests.support.padded_tables import padded_config, padded_params
from tests.support.steps import Row, make_step

mesh = Mesh(np.array(jax.devices()), "v")
assert mesh.size == 2
split, whole = NamedSharding(mesh, P("v", None)), NamedSharding(mesh, P())

# Equal maxima at 3 (first shard) and 7 (second); in the second row on one shard, 8 and 9.
scores = np.array([[0, 1, 2, 9, 3, 4, 5, 9, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7, 9, 9]], np.float32)
head = jax.device_put(scores.T, split)
assert [shard.data.shape for shard in head.addressable_shards] == [(5, 2)] * 2
hidden = jax.device_put(np.eye(2, dtype=np.float32), whole)

@functools.partial(jax.jit, out_shardings=whole, static_argnums=2)
def pick(hidden, head, V):
    logits = head_logits(hidden, head, num_ids=V)
    return _draft.pick(Vocabulary(V), DraftingConfig(num_drafts=1), logits, None, 0)[0]

# With 7 tokens the rest of the second shard is padding that scores as high or higher.
for V, best in (10, [3, 8]), (7, [3, 6]):
    for shard in pick(hidden, head, V).addressable_shards:
        assert shard.data.tolist() == best, shard

# A whole draft model whose embedding and head are split drafts what it drafts in one piece.
rows = [Row(slot=0, context=[5, 6, 7, 5], kept=[6], start=0), Row(slot=1, context=[9], kept=[3])]
step = make_step(rows, num_requests=2, num_rows=6, width=4, pages_per_request=4)
config = dataclasses.replace(DraftModelConfig.tiny(), draft_sampling="probabilistic")
params = llama.init_params(config.model, jax.random.key(0), "float32")
cache = CacheConfig(num_pages=8, page_size=4, max_model_len=16, dtype="float32")
temperature, seed = np.array([0, 0.9], np.float32), np.array([1, 2], np.int32)
batch = dataclasses.replace(prepare(*step, vocab_size=64), temperature=temperature, seed=seed)
memory = draft_model.init(config, params, cache, 2)
propose = jax.jit(draft_model.propose, static_argnums=(0, 4))
_, wanted = propose(config, params, memory, batch, 3)
assert wanted.num_drafts.tolist() == [3, 3]
config = padded_config(config)
params = padded_params(params)
where = {name: split if name in ("embed", "head") else whole for name in params}
params = {name: jax.device_put(params[name], where[name]) for name in params}
_, got = propose(config, params, *jax.device_put((memory, batch), whole), 3)
for shard in jax.device_put(got.tokens, whole).addressable_shards:
    assert shard.data.tolist() == wanted.tokens.tolist()
np.testing.assert_allclose(got.probs, wanted.probs, atol=1e-6)
print("the same on both shards")
"""


def test_ties_and_drafts_are_the_same_on_every_shard_of_the_vocabulary():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "the same on both shards\n", done.stderr


def test_a_target_with_padded_tables_gives_logits_of_its_tokens_alone():
    config = ModelConfig.tiny(num_layers=1, tie_embeddings=True)
    params = llama.init_params(config, jax.random.key(0), "float32")
    tokens = jnp.array([3, config.vocab_size, 5], jnp.int32)  # the second is no token
    view = state.PagedView(
        block_table=jnp.array([[0]], jnp.int32),
        seq_lens=jnp.array([3], jnp.int32),
        positions=jnp.arange(3, dtype=jnp.int32),
        slots=jnp.arange(3, dtype=jnp.int32),
        query_start=jnp.array([0, 3], jnp.int32),
    )
    cache = llama.init_pages(config, CacheConfig(num_pages=1, max_model_len=8, dtype="float32"))
    rows = jnp.arange(3, dtype=jnp.int32)
    wanted = llama.forward(config, params, tokens, view, cache, logit_rows=rows)[0]
    padded = padded_config(config)
    got = llama.forward(padded, padded_params(params), tokens, view, cache, logit_rows=rows)
    assert got[0].shape == (3, config.vocab_size)
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)


def test_a_padded_vocabulary_below_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="`padded_vocab_size` is 63, wanted .* at least 64"):
        ModelConfig.tiny(padded_vocab_size=63)
    with pytest.raises(ValueError, match="`padded_vocab_size` is 8, wanted .* at least 9"):
        HeadsConfig(
            hidden_size=8, vocab_size=20, num_heads=1, draft_vocab_size=9, padded_vocab_size=8
        )
