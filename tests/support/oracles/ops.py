"""The index ops as plain loops over Python integers, one request and one row at a time."""

from collections.abc import Sequence

PAD = -1
Rows = Sequence[Sequence[int]]


def next_token(
    sampled: Rows, discard: Sequence[bool], backup: Sequence[int], *, vocab_size: int
) -> tuple[list[int], list[int]]:
    """Returns (token, num_valid) of each request."""
    tokens, counts = [], []
    for row, dropped, known in zip(sampled, discard, backup, strict=True):
        valid = [] if dropped else [t for t in row if t != PAD and t < vocab_size]
        tokens.append(valid[-1] if valid else known)
        counts.append(len(valid))
    return tokens, counts


def sample_index(
    cu_num_drafts: Sequence[int], num_valid: Sequence[int], query_start: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Returns (last_index, num_rejected) of each request."""
    last, rejected, before = [], [], 0
    for r, total in enumerate(cu_num_drafts):
        drafted, before = total - before, total
        rejected.append(drafted + 1 - num_valid[r] if drafted else 0)
        last.append(query_start[r + 1] - 1 - rejected[r])
    return last, rejected


def slot_of(position: int, pages: Sequence[int], page_size: int) -> int:
    """Returns the slot of a position; past the table the last page answers, a PAD page none."""
    page = pages[min(position // page_size, len(pages) - 1)]
    return PAD if page < 0 else page * page_size + position % page_size


def eagle_step(
    positions: Sequence[int],
    block_table: Rows,
    seq_lens: Sequence[int],
    *,
    page_size: int,
    max_model_len: int,
    num_rows: int | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Returns (positions, slots, seq_lens) after one token more."""
    moved, slots, lengths = [], [], []
    for position, pages, length in zip(positions, block_table, seq_lens, strict=True):
        if position < 0 or position + 1 >= max_model_len:
            moved.append(0)
            slots.append(PAD)
            lengths.append(1)
        else:
            moved.append(position + 1)
            slots.append(slot_of(position + 1, pages, page_size))
            lengths.append(min(length + 1, max_model_len))
    slots += [PAD] * ((num_rows or len(slots)) - len(slots))
    return moved, slots, lengths


def expand_eagle(
    token_ids: Sequence[int],
    positions: Sequence[int],
    next_token: Sequence[int],
    query_start: Sequence[int],
    last_index: Sequence[int],
    *,
    num_slots: int,
    shift: bool,
    mask_token: int,
    pad_token: int = 0,
) -> dict[str, list]:
    """Returns the fields of ExpandedRows."""
    T, B, extra = len(token_ids), len(next_token), num_slots - int(shift)
    R = T + B * extra
    out = {
        "token_ids": [pad_token] * R,
        "positions": [0] * R,
        "rejected_mask": [True] * R,
        "masked_mask": [False] * R,
        "sample_index": [[0] * num_slots for _ in range(B)],
        "hidden_index": [PAD] * T,
        "hidden_source": [PAD] * R,
    }
    for r in range(B):
        begin, end, last = query_start[r], query_start[r + 1], last_index[r]
        if begin == end:
            continue
        start = begin + r * extra
        accepted = token_ids[begin + int(shift) : max(last + 1, begin)]
        num_kept = last + 1 - begin - int(shift)  # -1 if shift finds nothing to drop
        content = [next_token[r]] + [mask_token] * (num_slots - 1)
        content = list(accepted) + content[max(-num_kept, 0) :]
        for j, token in enumerate(content):
            out["token_ids"][start + j] = token
            out["positions"][start + j] = positions[begin] + j
            out["rejected_mask"][start + j] = False
            out["masked_mask"][start + j] = j > num_kept
        for k in range(num_slots):
            out["sample_index"][r][k] = start + max(num_kept + k, 0)
        for j in range(end - begin if shift else 0):
            out["hidden_index"][begin + j] = start + j
            if not out["masked_mask"][start + j]:
                out["hidden_source"][start + j] = begin + j
    return out


def expand_dflash(
    next_token: Sequence[int],
    positions: Sequence[int],
    query_start: Sequence[int],
    block_table: Rows,
    num_rejected: Sequence[int],
    *,
    num_drafts: int,
    page_size: int,
    mask_token: int,
    pad_token: int = 0,
    max_model_len: int | None = None,
) -> dict[str, list]:
    """Returns the fields of BlockRows."""
    T, B, W = len(positions), len(next_token), num_drafts + 1
    out = {
        "token_ids": [pad_token] * (B * W),
        "query_positions": [0] * (B * W),
        "query_slots": [PAD] * (B * W),
        "context_positions": [0] * T,
        "context_slots": [PAD] * T,
        "sample_index": [[r * W + 1 + k for k in range(num_drafts)] for r in range(B)],
    }
    limit = max_model_len
    for r in range(B):
        begin, end, pages = query_start[r], query_start[r + 1], block_table[r]
        accepted_end = end - num_rejected[r]
        for row in range(begin, end):
            position = positions[row]
            out["context_positions"][row] = position
            if limit is None or (row < accepted_end and position < limit):
                out["context_slots"][row] = slot_of(position, pages, page_size)
        for w in range(W if end > begin else 0):
            position = positions[max(accepted_end - 1, 0)] + 1 + w
            out["token_ids"][r * W + w] = mask_token if w else next_token[r]
            out["query_positions"][r * W + w] = (
                position if limit is None else min(position, limit - 1)
            )
            if limit is None or position < limit:
                out["query_slots"][r * W + w] = slot_of(position, pages, page_size)
    return out
