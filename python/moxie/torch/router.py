"""The included router: scores by a linear layer, top K of them, weights of the routes. Everything in float32.

Covers the routers of Mixtral and Qwen3-MoE (softmax, renormalised or not), DeepSeek-V3 (sigmoid, groups, a correction
bias for choosing) and GPT-OSS (bias, softmax over the chosen). Any other router will do: a layer takes ids and weights.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from moxie._errors import InvalidArgumentError

SCORES = ("softmax", "sigmoid", "softmax_of_chosen")


class Routing(NamedTuple):
    """What a router decides."""

    expert_ids: torch.Tensor  # [T, K] int64
    route_weights: torch.Tensor  # [T, K] float32
    scores: torch.Tensor  # [T, E] float32, before anything is chosen


class TopKRouter(nn.Module):
    """Which K of E experts each token visits, and with which weights.

    score          "softmax" or "sigmoid" of the logits, or "softmax_of_chosen": softmax over the K chosen logits
    normalize      divide the K weights by their sum (not with softmax_of_chosen, where it is 1)
    scale          multiplies the weights at the end
    bias           a bias on the logits
    correction     a buffer e_score_correction_bias [E], added to scores when experts are chosen, not to the weights
    num_groups     experts in as many equal groups; only those of the `top_groups` best groups (by the sum of their two
                   best scores) can be chosen. 1: no groups
    Raises InvalidArgumentError for numbers that do not fit together.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias: bool = False,
        correction: bool = False,
        num_groups: int = 1,
        top_groups: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if score not in SCORES:
            raise InvalidArgumentError(f"score is '{score}', must be one of {', '.join(SCORES)}")
        if not 1 <= top_k <= num_experts:
            nearest = min(max(top_k, 1), num_experts)
            raise InvalidArgumentError(
                f"top_k is {top_k}, must be between 1 and {num_experts}; nearest legal value {nearest}"
            )
        size = num_experts // max(num_groups, 1)
        if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups or top_groups * size < top_k:
            raise InvalidArgumentError(
                f"num_groups {num_groups} and top_groups {top_groups} do not fit {num_experts} experts with top_k "
                f"{top_k}: num_groups must divide the experts, top_groups of them must hold top_k; "
                "nearest legal values 1 and 1"
            )
        if num_groups > 1 and size < 2:
            raise InvalidArgumentError(
                f"num_groups is {num_groups}, must leave two experts to a group: groups are judged by their two best; "
                f"nearest legal value {num_experts // 2}"
            )
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.score, self.normalize, self.scale = score, normalize, scale
        self.num_groups, self.top_groups = num_groups, top_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))  # [E, H]
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if bias else None  # [E]
        self.e_score_correction_bias: Any
        values = torch.zeros(num_experts, dtype=torch.float32, device=device) if correction else None
        self.register_buffer("e_score_correction_bias", values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform weights as nn.Linear has, no bias."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> Routing:
        """x [..., H], tokens in order. Returns ids and weights [T, K], scores [T, E]."""
        x = x.reshape(-1, self.hidden)
        bias = None if self.bias is None else self.bias.float()
        logits = nn.functional.linear(x.float(), self.weight.float(), bias)  # [T, E]
        scores = logits.sigmoid() if self.score == "sigmoid" else logits.softmax(dim=-1)
        ids = self._choose(logits if self.score == "softmax_of_chosen" else scores)
        if self.score == "softmax_of_chosen":
            weights = logits.gather(1, ids).softmax(dim=-1)
        else:
            weights = scores.gather(1, ids)
            if self.normalize:
                weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return Routing(ids, weights * self.scale if self.scale != 1.0 else weights, scores)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.detach()
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.num_groups > 1:
            grouped = scores.unflatten(1, (self.num_groups, -1))  # [T, G, E/G]
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.top_groups, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score}"


def load_balancing_loss(routing: Routing) -> torch.Tensor:
    """E times the sum over experts of (share of the routes) times (mean score): 1 when all are equal, up to E.

    Scores are normalised per token first, so that sigmoid scores will do. Differentiable through the scores.
    """
    num_experts = routing.scores.shape[-1]
    scores = routing.scores / routing.scores.sum(dim=-1, keepdim=True)
    ids = routing.expert_ids.reshape(-1)
    share = torch.zeros(num_experts, device=scores.device).scatter_add(0, ids, torch.ones_like(ids, dtype=scores.dtype))
    return num_experts * torch.dot(share / max(ids.numel(), 1), scores.mean(dim=0))
