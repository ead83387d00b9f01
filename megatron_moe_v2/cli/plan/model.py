"""Models and clusters as the planner sees them: presets, Hugging Face configurations, and how tokens fall to ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import SettingsError

__all__ = ["PRESETS", "Cluster", "Model", "from_config"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a mixture-of-experts model asks of dispatch and combine.

    Attributes:
        hidden: H.
        num_experts, num_topk: E and K, routed experts alone.
        num_layers: layers that have experts.
        expert_ffn: width of an expert's inner layer.
        num_groups, topk_groups: the router takes its experts from ``topk_groups`` of ``num_groups`` groups.
        source: where the numbers are from.
    """

    name: str
    hidden: int
    num_experts: int
    num_topk: int
    num_layers: int
    expert_ffn: int
    num_groups: int = 1
    topk_groups: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("hidden", "num_experts", "num_topk", "num_layers", "expert_ffn", "num_groups", "topk_groups"):
            if getattr(self, field) < 1:
                raise SettingsError(field, got=getattr(self, field), expected="a positive number")
        if self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise SettingsError(
                "expert groups",
                got=f"{self.topk_groups} of {self.num_groups} with {self.num_experts} experts",
                expected="groups that divide the experts",
            )
        reachable = self.num_experts // self.num_groups * self.topk_groups
        if self.num_topk > reachable:
            raise SettingsError("num_topk", got=self.num_topk, expected=f"at most the {reachable} experts within reach")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who exchanges tokens, and how many each has.

    Attributes:
        ranks: R, ranks of the group that dispatches, which is expert-parallel times expert-tensor-parallel.
        gpus_per_node: GPUs of one NVLink domain.
        seq_len, micro_batch, tp, cp: a rank has ``seq_len * micro_batch / (tp * cp)`` tokens.
        etp: expert-tensor-parallel ranks, each of which receives every token of its experts.
    """

    ranks: int
    gpus_per_node: int = 8
    seq_len: int = 4096
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for field in ("ranks", "gpus_per_node", "seq_len", "micro_batch", "tp", "cp", "etp"):
            if getattr(self, field) < 1:
                raise SettingsError(field, got=getattr(self, field), expected="a positive number")
        if self.ranks % self.etp:
            raise SettingsError("ranks", got=self.ranks, expected=f"a multiple of the {self.etp} expert-tensor ranks")

    @property
    def tokens(self) -> int:
        """T, the most that a rank dispatches in one call."""
        return -(-self.seq_len * self.micro_batch // (self.tp * self.cp))

    @property
    def nodes(self) -> list[range]:
        """Ranks of each NVLink domain."""
        size = self.gpus_per_node
        return [range(first, min(first + size, self.ranks)) for first in range(0, self.ranks, size)]


# Where each number was read is its ``source``; a config.json passed to --config overrides all of this.
PRESETS = {
    "deepseek-v3": Model(
        name="DeepSeek-V3",
        hidden=7168,
        num_experts=256,
        num_topk=8,
        num_layers=58,  # of 61, the first 3 dense
        expert_ffn=2048,
        num_groups=8,
        topk_groups=4,
        source="config.json of deepseek-ai/DeepSeek-V3, as AMD-AGI/Primus restates it for Megatron",
    ),
    "qwen3-30b-a3b": Model(
        name="Qwen3-30B-A3B",
        hidden=2048,
        num_experts=128,
        num_topk=8,
        num_layers=48,
        expert_ffn=768,
        source="NVIDIA/Megatron-LM examples/post_training/modelopt/conf/qwen/Qwen3-30B-A3B.sh",
    ),
    "qwen3-235b-a22b": Model(
        name="Qwen3-235B-A22B",
        hidden=4096,
        num_experts=128,
        num_topk=8,
        num_layers=94,
        expert_ffn=1536,
        source="slime scripts/models/qwen3-235B-A22B.sh",
    ),
    "glm-4.5": Model(
        name="GLM-4.5",
        hidden=5120,
        num_experts=160,
        num_topk=8,
        num_layers=89,  # of 92, the first 3 dense
        expert_ffn=1536,
        source="Megatron-Bridge docs/models/llm/glm45.md",
    ),
    "kimi-k2": Model(
        name="Kimi-K2",
        hidden=7168,
        num_experts=384,
        num_topk=8,
        num_layers=60,  # of 61, the first dense
        expert_ffn=2048,
        source="config.json of moonshotai/Kimi-K2-Instruct, and slime scripts/models/kimi-k2.sh",
    ),
    "gpt-oss-120b": Model(
        name="gpt-oss-120b",
        hidden=2880,
        num_experts=128,
        num_topk=4,
        num_layers=36,
        expert_ffn=2880,
        source="openai/gpt-oss gpt_oss/torch/model.py",
    ),
    "mixtral-8x7b": Model(
        name="Mixtral-8x7B",
        hidden=4096,
        num_experts=8,
        num_topk=2,
        num_layers=32,
        expert_ffn=14336,
        source="config.json of mistralai/Mixtral-8x7B-v0.1, and keras-hub keras_hub/src/models/mixtral/README.md",
    ),
}

_NAMES = {
    "hidden": ("hidden_size", "d_model", "n_embd"),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "num_topk": ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k"),
    "layers": ("num_hidden_layers", "n_layer"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
}


def from_config(path: Path) -> Model:
    """Read a Hugging Face ``config.json``, or the folder that holds one.

    Raises:
        SettingsError: it cannot be read, or says nothing of experts; names the field.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError("--config", got=f"{path} ({error})", expected="a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise SettingsError("--config", got=f"{path} without an object", expected="a Hugging Face config.json")
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    found = {field: _number(config, names, path) for field, names in _NAMES.items()}
    grouped = config.get("topk_method") != "greedy"
    return Model(
        name=str(config.get("_name_or_path") or config.get("model_type") or path.parent.name),
        hidden=found["hidden"],
        num_experts=found["num_experts"],
        num_topk=found["num_topk"],
        num_layers=_expert_layers(config, found["layers"]),
        expert_ffn=found["expert_ffn"],
        num_groups=(config.get("n_group") or 1) if grouped else 1,
        topk_groups=(config.get("topk_group") or 1) if grouped else 1,
        source=str(path),
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise SettingsError(
        f"{path.name}",
        got=f"none of {', '.join(names)}",
        expected="an integer under one of them",
        fix="Use flags instead.",
    )


def _expert_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with experts: DeepSeek counts dense ones at the start, Qwen names them or takes every n-th."""
    dense = config.get("first_k_dense_replace") or 0
    every = config.get("decoder_sparse_step") or 1
    period = config.get("moe_layer_freq") or 1
    period = period if isinstance(period, int) else 1
    named = set(config.get("mlp_only_layers") or ())
    return sum(
        layer >= dense and layer % period == 0 and layer not in named and (layer + 1) % every == 0
        for layer in range(layers)
    )
