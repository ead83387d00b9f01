"""A plan for people."""

from __future__ import annotations

from collections.abc import Iterator

from . import Phase, Plan

__all__ = ["amount", "text"]


def amount(value: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} B"


def text(plan: Plan, alignment: int) -> str:
    return "\n".join([*_head(plan), *_sizes(plan), *_traffic(plan), *_activations(plan, alignment), *_tail(plan)])


def _head(plan: Plan) -> Iterator[str]:
    model, cluster = plan.model, plan.cluster
    groups = f", from {model.topk_groups} of {model.num_groups} groups" if model.topk_groups < model.num_groups else ""
    yield (
        f"{model.name}: hidden {model.hidden}, top-{model.num_topk} of {model.num_experts} experts{groups}, inner "
        f"{model.expert_ffn}, {model.num_layers} layers with experts"
    )
    yield f"  from {model.source}"
    each, left = divmod(model.num_experts, cluster.ranks // cluster.etp)
    experts = f"{model.num_experts} experts do not divide over them" if left else f"{each} experts a rank"
    nodes = f"{len(cluster.nodes)} node{'s' * (len(cluster.nodes) > 1)}"
    yield (
        f"{cluster.ranks} ranks on {nodes} of {cluster.gpus_per_node} GPUs, {plan.mode}, {experts}"
        + (f", expert tensor parallel {cluster.etp}" * (cluster.etp > 1))
    )


def _sizes(plan: Plan) -> Iterator[str]:
    cluster = plan.cluster
    yield ""
    yield (
        f"ceiling   {plan.ceiling} tokens a rank = sequence {cluster.seq_len} x micro-batch {cluster.micro_batch} / "
        f"(tp {cluster.tp} x cp {cluster.cp}); the most that a rank dispatches in one call"
    )
    yield (
        f"buffer    {plan.num_buffer_bytes} bytes ({plan.num_buffer_bytes / 2**30:.2f} GiB) a rank, "
        f"{'FP8' if plan.fp8 else 'bfloat16'} dispatch, shared by all layers"
    )


def _traffic(plan: Plan) -> Iterator[str]:
    copies = plan.copies
    if copies is None:
        return
    yield ""
    yield "rows for each token, balanced routing   own rank    NVLink   network"
    hybrid = len(plan.cluster.nodes) > 1
    for name, one in (
        ("plain all-to-all, one a selection", copies.plain),
        ("de-duplicated, direct: one a rank", copies.direct),
        *([("de-duplicated, hybrid: one a node", copies.hybrid)] if hybrid else []),
    ):
        yield f"  {name:<36}{one.own:>10.3f}{one.within:>10.3f}{one.between:>10.3f}"
    yield ""
    yield "sent by a rank in one layer             NVLink     network        time"
    for name, label in (("expected", "DeepEP V2"), ("plain", "plain all-to-all"), ("worst", "worst case, received")):
        for phase in ("dispatch", "combine"):
            yield _row(f"{phase}, {label}", plan.phases[phase][name])
    ours, plain = (
        sum(plan.phases[phase][name].seconds for phase in ("dispatch", "combine")) for name in ("expected", "plain")
    )
    total = 2e3 * plan.model.num_layers * ours
    if ours:
        yield (
            f"  plain takes {plain / ours:.2f} times as long; forward and backward of {plan.model.num_layers} layers: "
            f"{total:.1f} ms a micro-batch, without overlap"
        )
    speed = plan.bandwidths
    yield (
        f"  at {speed.efficiency:g} of {speed.nvlink_gbs:g} GB/s NVLink and {speed.rdma_gbs:g} GB/s network, both at "
        "once; no latency counted. Worst case: all tokens of all ranks go to one rank."
    )


def _row(name: str, phase: Phase) -> str:
    return f"  {name:<34}{amount(phase.within):>10}{amount(phase.between):>12}{phase.seconds * 1e3:>9.3f} ms"


def _activations(plan: Plan, alignment: int) -> Iterator[str]:
    if not plan.activations:
        return
    yield ""
    yield "activations of a layer, bytes a rank       token layout   expert layout"
    token, expert = plan.activations["token"], plan.activations["expert"]
    for field, label in (
        ("received", "rows received"),
        ("moved", "their permuted copy"),
        ("inner", "inside the experts"),
        ("output", "rows that leave them"),
        ("kept", "kept for backward"),
        ("peak", "with what lives beside it"),
        ("static", "rows received, static shapes"),
    ):
        yield f"  {label:<38}{amount(getattr(token, field)):>15}{amount(getattr(expert, field)):>16}"
    yield f"  bfloat16, gated experts, nothing recomputed; expert layout with alignment {alignment}, half of it padding"


def _tail(plan: Plan) -> Iterator[str]:
    yield ""
    if not plan.limits:
        yield "limits    none is hit"
    for one in plan.limits:
        yield f"limits    {one.status} {one.id}: {one.found}; needed: {one.needed}. {one.fix}"
    yield ""
    yield from plan.exports
