"""Plans as text for people: tiles, rings, Tensor Memory maps, and launches with every parameter."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from jax_fa_blackwell.kernels import registry
from jax_fa_blackwell.plan import attention, backward, forward, hopper, hopper_backward, hopper_forward, launch
from jax_fa_blackwell.plan.account import format_accounts
from jax_fa_blackwell.plan.slices import ROWS, SLICE
from jax_fa_blackwell.plan.spec import AttentionSpec
from jax_fa_blackwell.plan.target import Target

_NO_CUBIN = "0" * 64, "none"
"""In the place of digest and symbol in plans that are only shown; the cubin is found when a program is lowered."""


def format_attention(spec: AttentionSpec, target: Target) -> str:
    """What the kernels do for a call that they take: forward, then backward."""
    if target.arch == hopper.ARCH:
        tiles, passes = hopper_forward.plan_forward(spec, target), hopper_backward.plan_backward(spec, target)
        sections = _format_hopper_forward(tiles), _format_hopper_backward(passes)
    else:
        sections = (
            _format_forward(forward.plan_forward(spec, target)),
            _format_backward(backward.plan_backward(spec, target)),
        )
    launches = [
        format_plan(make(spec, target, lambda name: (name, *_NO_CUBIN)))
        for make in (attention.launch_forward, attention.launch_backward)
    ]
    return "\n".join((*sections[0], launches[0], *sections[1], launches[1]))


def _format_hopper_forward(plan: hopper_forward.ForwardPlan) -> list[str]:
    tile = plan.tile
    return _section(
        "forward",
        ("query tiles", f"{tile.rows} query rows, {hopper.TILE_ROWS} for each of {tile.warpgroups} warpgroups"),
        ("KV blocks", f"{tile.columns} keys; made for head dims up to {tile.head_dim} and {tile.value_dim}"),
        ("work items", f"{plan.items:,}, {plan.section:,} heads before the next"),
        *_hopper_memories(plan, f"{tile.stages} blocks of keys and of values"),
        ("cycles a tile", format_accounts([plan.account()])),
    )


def _format_hopper_backward(passes: Sequence[hopper_backward.Pass]) -> list[str]:
    lines = _section(
        "backward",
        ("passes", _products(passes)),
        ("cycles a tile", format_accounts([one.account() for one in passes])),
    )
    for one in passes:
        tile = one.tile
        side, other = ("keys", "queries") if tile.transposed else ("query rows", "keys")
        lines += _section(
            f"  pass for {_results(tile.transposed, tile.has_c1, tile.has_c2)}",
            ("tiles", f"{tile.rows} {side}, {hopper.TILE_ROWS} for each of {tile.warpgroups} warpgroups"),
            ("blocks", f"{tile.columns} {other}; made for head dims up to {tile.head_dim} and {tile.value_dim}"),
            *_hopper_memories(one, f"{tile.slots} blocks"),
        )
    return lines


def _hopper_memories(plan: hopper_forward.ForwardPlan | hopper_backward.Pass, ring: str) -> list[tuple[str, str]]:
    tile = plan.tile
    used = f"{plan.shared_bytes:,} of {plan.target.shared_bytes:,} bytes"
    registers = f"about {tile.registers} of {tile.consumer_registers} a thread"
    return [("ring", ring), ("registers", registers), ("shared memory", used)]


def _products(passes: Sequence[backward.Pass] | Sequence[hopper_backward.Pass]) -> str:
    # A pass counts in products of the mean head dim; five is what one pass over everything would cost.
    return f"{len(passes)}; {sum(one.gemms for one in passes):g} matrix products where one pass costs 5"


def _results(transposed: bool, has_values: bool, has_scores: bool) -> str:
    return ("dK" if has_scores else "") + ("dV" if has_values else "") if transposed else "dQ"


def _format_forward(plan: forward.ForwardPlan) -> list[str]:
    tiles = f"{plan.item_tiles} of {ROWS} query rows"
    if plan.item_tiles == 2:
        tiles += ", of two heads that share a key head" if plan.pair_heads else ", of one head"
    if plan.group == 2:
        tiles += ", by a pair of blocks"
    chunks = f" in {plan.value_chunks} chunks, each with its scores rebuilt" if plan.value_chunks > 1 else ""
    return _section(
        "forward",
        ("query tiles", tiles),
        (
            "KV blocks",
            f"{ROWS} keys; K in {plan.k_slices} and V in {plan.v_slices} slices of {SLICE} head dims{chunks}",
        ),
        ("work items", f"{plan.items:,}"),
        ("exponentials", _share(plan.polynomial_every)),
        *_memories(plan),
        ("cycles a tile", format_accounts([plan.account()])),
    )


def _format_backward(passes: Sequence[backward.Pass]) -> list[str]:
    lines = _section(
        "backward",
        ("passes", _products(passes)),
        ("cycles a tile", format_accounts([one.account() for one in passes])),
    )
    for one in passes:
        lines += _section(
            f"  pass for {_results(one.transposed, one.value_part > 0, one.score_part > 0)}",
            ("tiles", _pair(f"{ROWS} {'keys' if one.transposed else 'query rows'}", one.group)),
            ("blocks", f"{one.columns} {'query rows' if one.transposed else 'keys'}"),
            ("parts", f"{one.parts}, each with its scores rebuilt" if one.parts > 1 else "1"),
            *_memories(one),
        )
    return lines


def _pair(rows: str, group: int) -> str:
    return f"{group} of {rows}, by a pair of blocks" if group == 2 else rows


def _share(polynomial_every: int) -> str:
    share = f", one pair of {polynomial_every} by a polynomial" if polynomial_every else ""
    return f"by ex2.approx{share}"


def _memories(plan: forward.ForwardPlan | backward.Pass) -> list[tuple[str, str]]:
    columns = ", ".join(f"{name} {first}..{end - 1}" for name, first, end in plan.tensor_memory_map())
    used = f"{plan.shared_bytes:,} of {plan.target.shared_bytes:,} bytes"
    return [("ring", f"{plan.slots} slots"), ("Tensor Memory", f"columns {columns}"), ("shared memory", used)]


def _section(title: str, *rows: tuple[str, str]) -> list[str]:
    indent = " " * (len(title) - len(title.lstrip()) + 2)
    return [title, *(f"{indent}{name:<{18 - len(indent)}} {text}" for name, text in rows)]


def format_plan(plan: launch.LaunchPlan) -> str:
    """A LaunchPlan as text for people: its buffers, then for each architecture the fills and launches in order."""
    sizes = (*plan.argument_bytes, *plan.result_bytes)
    lines = [f"plan {plan.name}"]
    lines += [f"  {_operand(plan, index):<14} {size:,} bytes" for index, size in enumerate(sizes)]
    for program in plan.programs:
        lines.append(f"  {program.arch}")
        for step in program.steps:
            if isinstance(step, launch.Fill):
                place = _place(plan, step.operand, step.offset_bytes)
                lines.append(f"    fill {place} with {step.words:,} words of {step.word:#010x}")
            else:
                lines += [f"    {line}" for line in _format_launch(plan, step)]
    return "\n".join(lines)


def _format_launch(plan: launch.LaunchPlan, step: launch.Launch) -> list[str]:
    details = [
        ("cubin", "found when a program is lowered" if step.sha256 == _NO_CUBIN[0] else _cubin(step)),
        ("grid", _extents(step.grid)),
        ("block", _extents(step.block)),
        ("cluster", _extents(step.cluster)),
        ("shared memory", f"{step.shared_bytes:,} bytes, dynamic"),
    ]
    if step.programmatic:
        details.append(("start", "may overlap the end of the launch before"))
    lines = [f"launch {step.kernel}"]
    lines += [f"  {name:<14} {text}" for name, text in details]
    # Numbers are many and short and share lines; each operand has its own.
    named = list(zip(_parameter_names(step), step.params, strict=True))
    width = max(len(name) for name, _ in named) if named else 0
    numbers = []
    for name, param in named:
        if isinstance(param, launch.Int32 | launch.Float32):
            numbers.append(f"{name}={_number(param)}")
        else:
            lines.append(f"  parameter      {name:<{width}}  {_format_operand(plan, param)}")
    return lines + textwrap.wrap(" ".join(numbers), 110, initial_indent="  numbers        ", subsequent_indent=" " * 17)


def _cubin(step: launch.Launch) -> str:
    return f"sha256 {step.sha256[:12]}, symbol {step.symbol}"


def _parameter_names(step: launch.Launch) -> list[str]:
    """From the kernel's declaration; numbers where this version of the package has no such kernel."""
    variant = registry.VARIANTS.get(step.kernel)
    if variant is None or len(variant.parameters) != len(step.params):
        return [str(index) for index in range(len(step.params))]
    return [parameter.name for parameter in variant.parameters]


def _number(param: launch.Int32 | launch.Float32) -> str:
    return str(param.value) if isinstance(param, launch.Int32) else f"{param.value:#.6g}"


def _format_operand(plan: launch.LaunchPlan, param: launch.TensorMap | launch.Pointer | launch.Bytes) -> str:
    match param:
        case launch.TensorMap():
            parts = [
                f"tensor map of {_place(plan, param.operand, param.offset_bytes)}: {param.dtype}",
                f"dims {_extents(param.dims)}",
                f"strides {_extents(param.strides_bytes)} bytes" if param.strides_bytes else "contiguous",
                f"box {_extents(param.box)}",
                f"swizzle {param.swizzle}, outside {param.fill}, L2 promotion {param.l2_promotion}",
            ]
            if any(step != 1 for step in param.element_strides):
                parts.append(f"element strides {_extents(param.element_strides)}")
            return ", ".join(parts)
        case launch.Pointer():
            return f"pointer to {_place(plan, param.operand, param.offset_bytes)}"
        case launch.Bytes():
            return f"{len(param.data)} bytes {param.data.hex()}"


def _operand(plan: launch.LaunchPlan, index: int) -> str:
    arguments = len(plan.argument_bytes)
    return f"argument {index}" if index < arguments else f"result {index - arguments}"


def _place(plan: launch.LaunchPlan, index: int, offset_bytes: int) -> str:
    return _operand(plan, index) + (f" + {offset_bytes:,} bytes" if offset_bytes else "")


def _extents(extents: Sequence[int]) -> str:
    return " x ".join(str(extent) for extent in extents)
