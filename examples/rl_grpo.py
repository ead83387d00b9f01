"""Group-relative policy optimisation: several answers to a prompt, each judged against the others.

Legend: B sequences of this rank, G answers to a prompt, side by side, A bytes of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def advantages(rewards: Tensor, group: int) -> Tensor:
    """Rewards ``[B]`` less the mean of their group of G, over its deviation; 0 where all answers are equally good."""
    groups = rewards.view(-1, group)
    deviation = groups.std(dim=1, keepdim=True, correction=0)
    return ((groups - groups.mean(dim=1, keepdim=True)) / (deviation + 1e-4)).flatten()


def answer_logprobs(logits: Tensor, tokens: Tensor, answer_len: int) -> Tensor:
    """Log-probability of each byte of the answers, float32 ``[B, A]``.

    Args:
        logits: ``[B, P + A - 1, vocab]`` of ``tokens[:, :-1]``.
        tokens: ``[B, P + A]``.
    """
    scores = logits[:, -answer_len:].float().log_softmax(dim=-1)
    return scores.gather(-1, tokens[:, -answer_len:, None]).squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """This rank's part of the objective.

    Attributes:
        loss: scalar with gradient; the *sum over ranks* is minimised.
        kl: sum over this rank's bytes of the estimated divergence from the reference.
        gap: sum of the distances between log-probabilities in the rollout and now.
    """

    loss: Tensor
    kl: Tensor
    gap: Tensor


def grpo_terms(
    now: Tensor,
    rollout: Tensor,
    reference: Tensor,
    advantage: Tensor,
    written: Tensor,
    *,
    global_bytes: float,
    clip: float,
    kl_weight: float,
) -> Terms:
    """Clipped policy gradient and divergence from the reference, averaged over the written bytes of all ranks.

    The divergence is estimated per sampled byte as ``q/p - log(q/p) - 1``, p the policy's and q the reference's
    probability: never negative, and right on average.

    Args:
        now, rollout, reference: log-probabilities ``[B, A]`` under the weights of the moment (with gradient), of the
            rollout, of the reference.
        advantage: ``[B]``.
        written: bool ``[B, A]``.
    """
    ratio = (now - rollout).exp()
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    against = reference - now
    kl = against.exp() - against - 1
    loss = ((kl_weight * kl - gain) * written).sum(dtype=torch.float64) / global_bytes
    with torch.no_grad():
        return Terms(
            loss=loss,
            kl=(kl * written).sum(dtype=torch.float64),
            gap=((now - rollout).abs() * written).sum(dtype=torch.float64),
        )
