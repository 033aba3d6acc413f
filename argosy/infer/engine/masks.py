"""Masks of the tokens that requests allow next, for the sampler's state. Host only: NumPy."""

from collections.abc import Callable, Sequence

import numpy as np

from argosy.infer.engine.request import FinishReason
from argosy.infer.engine.state import RequestState
from argosy.infer.tools.grammar import grammar_masks, unpacked_bits

# A slot, and the token mask that is written into its row of the sampler's state.
MaskRow = tuple[int, np.ndarray]


def mask_rows(
    due: Sequence[RequestState], vocab: int, close: Callable[[RequestState, FinishReason], None]
) -> list[MaskRow]:
    """The token masks that differ from those written before, with their slots. Records them in `RequestState.mask`.

    Args:
        due: requests with a grammar, or with bans that depend on their completion, that are sampled next.
        close: called with a request that no token may follow, and the reason why it ends.
    """
    rows: list[tuple[RequestState, np.ndarray]] = []
    matchers = [state.matcher for state in due if state.matcher is not None]
    grammars = iter(zip(*grammar_masks(matchers), strict=True) if matchers else ())
    for state in due:
        if state.matcher is None:
            rows.append((state, state.restrictions.bits(state.completion)))
            continue
        row, kind = next(grammars)
        goes_on = kind in ("open", "accepting")
        if goes_on and state.restrictions:
            goes_on = state.restrictions.leaves(unpacked_bits(row, vocab), state.completion)
            row = row & state.restrictions.bits(state.completion)
        if goes_on:
            rows.append((state, row))
        else:
            close(state, "stop" if kind in ("accepting", "complete") else "blocked")
    changed = []
    for state, row in rows:
        if (mask := row.tobytes()) != state.mask:
            state.mask = mask
            changed.append((state.scheduled.slot, row))
    return changed


def mask_arrays(rows: Sequence[MaskRow], count: int, no_slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs slots [count] and masks [count, words] into arrays. Unused entries get the slot `no_slot`, which does not exist."""
    slots, values = np.full(count, no_slot, np.int32), np.zeros((count, len(rows[0][1])), rows[0][1].dtype)
    for i, (slot, row) in enumerate(rows):
        slots[i], values[i] = slot, row
    return slots, values
