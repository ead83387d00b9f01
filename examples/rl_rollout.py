"""Rollouts: a byte of every sequence at a time, with static shapes, in a CUDA graph where there is CUDA.

One step takes the last byte of each sequence and gives the logits of the next, prompts included: all prompts have one
length, so the loop over positions is the same on all ranks, which every dispatch and combine needs. Nothing in it
waits for the device.

Legend: B sequences of this rank, P bytes of a prompt, A of an answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from moe_model import Decoding, MoELanguageModel
from torch import Tensor

from megatron_moe_v2 import RoutingReplay, capture


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What was sampled.

    Attributes:
        tokens: int64 ``[B, P + A]``.
        logprobs: float32 ``[B, A]``, of the sampled bytes, as the sampling saw them.
    """

    tokens: Tensor
    logprobs: Tensor


def gumbel_noise(count: int, answer_len: int, vocab: int, first: int, end: int, seed: int) -> Tensor:
    """Noise ``[A, end - first, vocab]`` of sequences ``first`` to ``end`` of ``count``: the same at any rank count."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(count, answer_len, vocab).exponential_(generator=generator).log_().neg_()
    return noise[first:end].transpose(0, 1).contiguous()


def _decode(model: MoELanguageModel, decoding: Decoding, replay: RoutingReplay, tokens: Tensor) -> Tensor:
    """Logits ``[B, vocab]`` of what follows ``tokens [B, 1]``."""

    def record(block: int, topk_idx: Tensor) -> Tensor:
        replay.record(block, topk_idx, decoding.position)
        return topk_idx

    logits: Tensor = model(tokens, decoding=decoding, choose=record)[0]
    return logits[:, 0].float()


class Sampler:
    """Samples answers with the model's present weights.

    Args:
        sequences: B, fixed.
        replay: takes what the router chooses, with P + A - 1 positions.
    """

    def __init__(
        self, model: MoELanguageModel, *, sequences: int, prompt_len: int, answer_len: int, replay: RoutingReplay
    ) -> None:
        self.model, self.prompt_len, self.answer_len, self.replay = model, prompt_len, answer_len, replay
        device = model.head.weight.device
        self.decoding = Decoding(
            model.config,
            sequences=sequences,
            positions=prompt_len + answer_len - 1,
            dtype=model.compute_dtype,
            device=device,
        )
        self._input = torch.zeros(sequences, 1, dtype=torch.int64, device=device)
        self._step: Callable[..., Any] | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the step, anew after buffers were closed. Collective over the group."""
        # No bound method: the sampler in a cycle would keep the process group until the interpreter ends.
        step = functools.partial(_decode, self.model, self.decoding, self.replay)
        self._step = capture(step, self._input)

    @torch.inference_mode()
    def sample(self, prompts: Tensor, noise: Tensor) -> Rollout:
        """Answer ``prompts [B, P]`` at temperature 1. Collective over the group.

        Args:
            noise: of :func:`gumbel_noise`; the byte with the largest sum of log-probability and noise is taken.
        """
        assert self._step is not None
        self.replay.clear()
        tokens = torch.cat((prompts, prompts.new_zeros(len(prompts), self.answer_len)), dim=1)
        logprobs = noise.new_zeros(len(prompts), self.answer_len)
        for position in range(tokens.shape[1] - 1):
            self.decoding.position.fill_(position)
            scores = self._step(tokens[:, position : position + 1]).log_softmax(dim=-1)
            answered = position + 1 - self.prompt_len
            if answered >= 0:
                sampled = (scores + noise[answered]).argmax(dim=-1, keepdim=True)
                tokens[:, position + 1 :][:, :1] = sampled
                logprobs[:, answered : answered + 1] = scores.gather(1, sampled)
        with torch.inference_mode(False):  # the training forward keeps them for its backward
            return Rollout(tokens=tokens.clone(), logprobs=logprobs.clone())
