"""Tokens of one step for the next one, on the device: a launch before it and one after it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom.model_ops.kernels.torch.carried import CarriedInputs, CarriedTokens

_TILE = 128


@triton.jit(do_not_specialize=["num_tokens", "num_newest"])
def _take(
    kept_ids_ptr, kept_positions_ptr, places_ptr, tables_ptr,
    input_ids_ptr, positions_ptr, slots_ptr, context_lens_ptr,
    next_ids_ptr, sampled_positions_ptr, drafts_ptr,
    num_tokens, num_newest, kept_width, table_width, block_size,
    HAS_NEXT: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DRAFTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of the tokens."""
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = index < num_tokens
    row = tl.load(places_ptr + index, mask=inside, other=0)
    offset = tl.load(places_ptr + num_tokens + index, mask=inside, other=0)
    token = tl.load(places_ptr + 2 * num_tokens + index, mask=inside, other=0)
    target = tl.load(places_ptr + 4 * num_tokens + index, mask=inside, other=0)
    count = tl.load(places_ptr + 5 * num_tokens + index, mask=inside, other=0)
    start = tl.load(kept_positions_ptr + row, mask=inside, other=0)
    token_id = tl.load(kept_ids_ptr + row * kept_width + offset, mask=inside, other=0)
    position = start + offset
    block = tl.load(tables_ptr + row * table_width + position // block_size, mask=inside, other=0)
    tl.store(input_ids_ptr + token, token_id, mask=inside)
    tl.store(positions_ptr + token, position, mask=inside)
    slot = block.to(tl.int64) * block_size + position % block_size
    tl.store(slots_ptr + token, slot, mask=inside)
    is_newest = index < num_newest
    context_lens = (start + count).to(tl.int32)
    tl.store(context_lens_ptr + target, context_lens, mask=is_newest)
    if HAS_POSITIONS:
        sample = tl.load(places_ptr + 3 * num_tokens + index, mask=inside, other=0)
        tl.store(sampled_positions_ptr + sample, position + 1, mask=inside)
    is_draft = inside & (index >= num_newest)
    if HAS_NEXT:
        tl.store(next_ids_ptr + token - 1, token_id, mask=is_draft)
    if HAS_DRAFTS:
        tl.store(drafts_ptr + target, token_id, mask=is_draft)


@triton.jit(
    do_not_specialize=["num_sequences", "token_stride", "draft_stride", "num_drafts"],
    do_not_specialize_on_alignment=["positions_ptr", "token_ids_ptr", "drafts_ptr"],
)
def _leave(
    kept_ids_ptr, kept_positions_ptr, places_ptr, token_ids_ptr, num_accepted_ptr,
    positions_ptr, drafts_ptr, num_sequences, kept_width, token_stride, draft_stride, num_drafts,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: sequences."""
    sequence = tl.program_id(0)
    row = tl.load(places_ptr + sequence)
    first = tl.load(places_ptr + num_sequences + sequence)
    accepted = tl.load(num_accepted_ptr + sequence)
    newest = tl.load(token_ids_ptr + sequence * token_stride + accepted)
    tl.store(kept_ids_ptr + row * kept_width, tl.maximum(newest, 0))
    tl.store(kept_positions_ptr + row, tl.load(positions_ptr + first) + accepted + 1)
    place = tl.arange(0, WIDTH)
    inside = place < num_drafts
    drafts = tl.load(drafts_ptr + sequence * draft_stride + place, mask=inside, other=0)
    tl.store(kept_ids_ptr + row * kept_width + 1 + place, drafts, mask=inside)


def take_carried(
    carried: CarriedTokens,
    inputs: CarriedInputs,
    places: torch.Tensor,
    num_newest: int,
    block_tables: torch.Tensor,
    block_size: int,
) -> None:
    """As in `kernels/torch/carried.py`; all tensors contiguous.

    Raises:
        ValueError: when shapes do not fit.
    """
    if places.shape[0] != 6 or not places.is_contiguous() or not block_tables.is_contiguous():
        raise ValueError(
            f"take_carried wants contiguous places [6, A] and block tables; given places "
            f"{list(places.shape)} {places.stride()}, block tables {list(block_tables.shape)} "
            f"{block_tables.stride()}"
        )
    count = places.shape[1]
    if count == 0:
        return
    unused = inputs.input_ids
    optional = (inputs.next_token_ids, inputs.sampled_positions, inputs.drafts)
    _take[(triton.cdiv(count, _TILE),)](
        carried.token_ids,
        carried.positions,
        places,
        block_tables,
        inputs.input_ids,
        inputs.positions,
        inputs.slots,
        inputs.context_lens,
        *(unused if t is None else t for t in optional),
        count,
        num_newest,
        carried.token_ids.shape[1],
        block_tables.shape[1],
        block_size,
        HAS_NEXT=inputs.next_token_ids is not None,
        HAS_POSITIONS=inputs.sampled_positions is not None,
        HAS_DRAFTS=inputs.drafts is not None,
        TILE=_TILE,
        num_warps=4,
    )


def leave_carried(
    carried: CarriedTokens,
    places: torch.Tensor,
    token_ids: torch.Tensor,
    num_accepted: torch.Tensor,
    positions: torch.Tensor,
    drafts: torch.Tensor | None,
) -> None:
    """As in `kernels/torch/carried.py`.

    Raises:
        ValueError: when shapes do not fit.
    """
    count, num_drafts = token_ids.shape[0], 0 if drafts is None else drafts.shape[1]
    room = carried.token_ids.shape[1] - 1
    if places.shape != (2, count) or not places.is_contiguous() or num_drafts > room:
        raise ValueError(
            f"leave_carried wants contiguous places [2, {count}] and at most {room} drafts; given "
            f"places {list(places.shape)} {places.stride()}, {num_drafts} drafts"
        )
    if count == 0:
        return
    # Drafts [S, n] may be rows of a wider tensor, but not columns.
    made = None if drafts is None or not num_drafts else drafts
    made = made if made is None or made.stride(1) == 1 else made.contiguous()
    token_ids = token_ids if token_ids.stride(1) == 1 else token_ids.contiguous()
    _leave[(count,)](
        carried.token_ids,
        carried.positions,
        places,
        token_ids,
        num_accepted,
        positions,
        token_ids if made is None else made,
        count,
        carried.token_ids.shape[1],
        token_ids.stride(0),
        0 if made is None else made.stride(0),
        num_drafts,
        WIDTH=triton.next_power_of_2(max(room, 1)),
        num_warps=1,
    )
