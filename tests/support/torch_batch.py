"""What a runner owns besides its drafter: tables of the target, the batch, what a pass gave."""

import dataclasses

import numpy as np
import torch

from tests.support.torch_runner import CommonAttentionMetadata, Request


class LlamaTables(torch.nn.Module):
    """What a target of Llama form shares with a drafter, under the names of vLLM and transformers.

    Args:
      embed: float [V or more, D].
      head: likewise; None ties it to the embedding.
    """

    def __init__(self, embed: torch.Tensor, head: torch.Tensor | None):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(*embed.shape)
        self.model.embed_tokens.weight = torch.nn.Parameter(embed)
        if head is not None:
            self.lm_head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False)
            self.lm_head.weight = torch.nn.Parameter(head)


class InputBatch:
    """The requests of a step, one a row of memory that stays; rows move up when requests leave."""

    def __init__(self, max_requests: int, max_model_len: int, vocab_size: int):
        self.token_ids_cpu_tensor = torch.zeros(max_requests, max_model_len, dtype=torch.int32)
        self.token_ids_cpu = self.token_ids_cpu_tensor.numpy()
        self.num_tokens_no_spec = np.zeros(max_requests, np.int32)
        self.num_prompt_tokens = np.zeros(max_requests, np.int32)
        self.vocab_size = vocab_size
        self.req_ids: list[str] = []
        self.req_id_to_index: dict[str, int] = {}
        self.prev_req_id_to_index: dict[str, int] | None = None

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    def arrange(self, requests: dict[str, Request], num_prompt: dict[str, int]) -> None:
        self.prev_req_id_to_index = self.req_id_to_index or None
        self.req_ids = list(requests)
        self.req_id_to_index = {name: row for row, name in enumerate(requests)}
        for row, (name, request) in enumerate(requests.items()):
            self.num_tokens_no_spec[row] = len(request.tokens)
            self.num_prompt_tokens[row] = num_prompt[name]
            self.token_ids_cpu[row, : len(request.tokens)] = request.tokens

    def append(self, sampled: list[list[int]]) -> None:
        for row, tokens in enumerate(sampled):
            start = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, start : start + len(tokens)] = tokens
            self.num_tokens_no_spec[row] += len(tokens)


@dataclasses.dataclass
class TargetStep:
    """What a pass of the target gave: flat rows of the requests, in the batch's order.

    Attributes:
      requests: by id, as known before the pass.
      num_prompt: prompt tokens by id.
      token_ids, positions: [T].
      metadata: of the pass.
      num_drafts: verified drafts of each request.
      sampled: int32 [B, W]; PAD after the last one that was kept.
      discard: bool [B]; True where a prompt is not read to its end.
      hidden: float [T, D] of each layer that the drafter reads, or of the last one.
    """

    requests: dict[str, Request]
    num_prompt: dict[str, int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: CommonAttentionMetadata
    num_drafts: list[int]
    sampled: torch.Tensor
    discard: torch.Tensor
    hidden: list[torch.Tensor]
